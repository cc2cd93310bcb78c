"""Drop-in companions: other libraries' functions by their own names, arguments, defaults and return values.

Each serves what ``cute_fa.forward`` can do, and refuses the rest by the name that its caller used.
"""
