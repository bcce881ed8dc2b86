"""Random problems for every public operation, with an oracle of their own: ``make fuzz``.

- ``draw``: how a problem's options are drawn, fixed, recorded and shrunk;
- ``arrays``: arrays in every dtype, view and kind, with guards around them;
- ``checks``: what is compared, and how near it must be;
- ``problems``: the registry; ``*_problems``: one function for each operation, which draws, calls and checks;
- ``*_oracle``: brute force over tokens in float64, written from the definitions of docs/guide/concepts.rst, which calls nothing of the package;
- ``campaign``: worker processes, crashes, replay and shrinking.
"""
