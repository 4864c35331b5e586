"""What is run: jobs of a recipe, side by side, each from where it was left off.

A recipe comes in; a folder of checked events and checkpoints, and the results read from it, go out.
"""
