"""Models and text to train on."""
