"""`python -m csv_decode` is `csv-decode`."""

from .cli import main

main()
