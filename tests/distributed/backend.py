"""The backend that the tests of torch.distributed run on."""

import os

# Another name shows what they do on another backend: what is true of c10d.
BACKEND = os.environ.get("HVDLITE_TEST_BACKEND", "hvdlite")
