"""What is learnt from: digits, and trees of images, found, checked, split by keys and augmented on the device.

Folders and zips come in; tensors of images and labels, the same for the same seed, go out.
"""
