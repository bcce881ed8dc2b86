"""Random problems for every public operation, checked by oracles: ``make fuzz``.

- ``draw``: draws, fixes and records the options of a problem;
- ``arrays``: arrays in every dtype, view and kind, with guards around them;
- ``checks``: comparisons of results, and their tolerances;
- ``problems``: the registry; ``*_problems``: a function for each operation, which draws, calls and checks;
- ``*_oracle``: brute force over tokens in float64, which follows the definitions of docs/guide/concepts.rst and calls nothing of the package;
- ``campaign``: worker processes, crashes, replay and shrinking.
"""
