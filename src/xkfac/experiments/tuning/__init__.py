"""What is chosen: learning rate and damping, task by task, on target data alone.

A recipe with grids comes in; trials, choices with their reasons, and a normal run with the chosen settings go out.
"""
