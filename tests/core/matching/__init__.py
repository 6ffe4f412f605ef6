"""hvdlite/_core/matching: ranks that disagree, join or leave."""
