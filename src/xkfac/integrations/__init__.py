"""Adapters for training frameworks, one module per framework, which needs the extra of the same name.

A framework's trainer and a memory come in; a trainer that protects what the network knows, and the next memory, go out.
"""
