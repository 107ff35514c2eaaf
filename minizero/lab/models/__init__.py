"""Models to train and to measure, and text to train on.

`gpt` (a small GPT in plain PyTorch), `corpus` (bytes of real text, cut into batches),
`activations` (what that GPT saves for backward, by formula); and cut over the ranks:
`tensor_parallel` (its blocks), `ulysses` (its tokens).
"""
