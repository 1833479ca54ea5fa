"""What several folders share: checks of arguments, trees, linear algebra,
and what depends on the platform.

It imports nothing of the folders that use it.
"""
