"""What learns: perceptrons, torchvision and timm networks with one head per task, and their weights.

The name of a network and a weights file come in; a network that knows its source task goes out.
"""
