"""hvdlite.world: init and shutdown, process sets, knobs, placement, how ranks end."""
