"""Names of people and places. Nobody is meant."""

# ruff: noqa: SIM905 - words in a row are read more easily than a list of them

from typing import Final

FIRST_NAMES: Final = (
    "Ada Amir Anna Bela Boris Carla Chen Clara Dario Dina Edgar Elif Emma Farid Felix Greta Hana Hugo Ines Ivan "
    "Jana Jonas Kaya Lars Lena Lior Luca Maja Marek Mina Nadia Nils Noor Olga Omar Paula Pavel Rosa Sami Selma "
    "Tariq Tessa Theo Vera Viktor Wanda Yara Yusuf Zoe"
).split()

LAST_NAMES: Final = (
    "Abbott Adler Baker Berg Brandt Castro D'Angelo Dahl Dubois Egger Fischer Fontana Garcia Grant Haas Hansen Ito "
    "Jansen Keller Kim Kovacs Lang Lindqvist Lopez Maier Marsh Meyer Moreau Nowak O'Brien O'Neill Okafor Olsen Patel "
    "Petrov Quist Rossi Sato Schmidt Silva Tanaka Torres Ueda Vance Vogel Weber Wolf Yilmaz Zeman"
).split()

CITIES: Final = (
    "Aldbury Brackwater Castlebay Dunmore Eastfield Fairhaven Greystone Highmoor Ivyport Juniper Kingsbridge Larkhill "
    "Millbrook Northgate Oakridge"
).split()

MAIL_HOSTS: Final = ("example.org", "example.net", "example.com")
