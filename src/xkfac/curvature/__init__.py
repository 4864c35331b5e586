"""What is measured: the Fisher information of every unit as Kronecker factors, diagonals or corrected blocks.

Inputs and output gradients of units come in, batch by batch; a `Curvature`, an operator on displacements, goes out.
"""
