"""The laboratory: what the chapters, their figures and the command line need.

- `models/`: a GPT, its text, what it saves for backward; models cut in other ways.
- `toygpu` (a budget of bytes that is enforced), `toymachine` (bytes that cost time).
- `magic` and `cells`: `%%ranks`, in the notebook and on a rank.
- `plots/`: figures. `explorables/`: figures to play with.
- `hardware` (data sheets, break-even), `measure` (a timed step), `traffic` (bytes that
  operators move), `ptx` (what a kernel is compiled to), `recorded` (planner's runs).
- `training`: `python -m minizero train`. `course/`: exercises, checked and graded.

It imports anything of minizero; nothing that trains imports it.
"""
