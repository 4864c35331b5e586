"""Adapters for other frameworks, one module each, which need the extra of the same name.

A framework's own objects come in, and calls of this library go out; nothing here is imported by `import xkfac`.
"""
