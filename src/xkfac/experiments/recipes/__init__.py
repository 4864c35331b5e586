"""What an experiment is: recipes in TOML, checked key by key before anything runs.

Text and settings come in; a `Recipe` with its lines goes out. The recipes that come with the package lie here too.
"""
