"""Random programs: as data and source (`programs`), statement by statement (`builder`), and which statements there are.

`pure`, `known`, `effects`, `views` and `regions` register kinds of statements; `drawing` draws a whole program,
`corpus` has the written ones. Nothing here runs a program fused.
"""
