"""Random programs of collectives give on several ranks what one process computes.

Each layer imports only from those below it:

         draw programs                    play and check them

         test_programs  ──────────┐       test_found
               │                  │           │
           strategies             └──────── check
               │                              │
            wishes ───────────┐             play
               │              │               │
         disagreements    validity          posted
               │              │               │
               │              │            oracle
               └──────────────┼───────────────┘
                          programs
                              │
                            calls

- calls: one collective with its arguments, as data; its repr is the code that makes it.
- programs: the steps of all ranks. A step is a call, a process set, and how each rank makes it (at
  once, early, late, in place); ticks order the steps, so that ranks never wait in a circle.
- validity: says whether hvdlite has to run a program: no name is twice in flight, for example.
- disagreements: calls that one rank may make instead, after which all ranks must get an error.
- wishes: makes a valid program of wishes that do not depend on each other, so that hypothesis can
  remove any of them when it shrinks a program that failed.
- strategies: draws the wishes at random.
- oracle: draws the inputs, and computes each rank's results in one process, in plain torch.
- posted: one step on one rank: calls hvdlite, and compares the result with the oracle's.
- play: one rank's part of a program: its threads, and the order of what it posts and waits for.
- check: plays a program on a world, and compares the outcomes of all ranks; test_programs and
  test_found call it. A program that fails is printed as code, which test_found can keep.
"""
