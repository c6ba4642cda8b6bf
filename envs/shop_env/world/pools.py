"""Names of people, places and products. Nobody is meant."""

# ruff: noqa: SIM905 - words in a row are read more easily than a list of them

from typing import Final

from .words import Category

FIRST_NAMES: Final = (
    "Ada Amir Anna Bela Boris Carla Chen Clara Dario Dina Edgar Elif Emma Farid Felix Greta Hana Hugo Ines Ivan Jana "
    "Jonas Kaya Lars Lena Luca Maja Marek Mina Nadia Nils Noor Olga Omar Paula Pavel Rosa Selma Tariq Vera Yusuf Zoe"
).split()

LAST_NAMES: Final = (
    "Abbott Adler Baker Berg Castro D'Angelo Dahl Dubois Fischer Fontana Garcia Grant Haas Hansen Ito Jansen Keller "
    "Kim Kovacs Lang Lindqvist Lopez Marsh Moreau Nowak O'Brien Okafor Olsen Patel Petrov Rossi Sato Silva Tanaka Vogel"
).split()

CITIES: Final = "Aldbury Brackwater Castlebay Dunmore Eastfield Fairhaven Greystone Highmoor Ivyport".split()
STREETS: Final = "Mill Lane|Station Road|High Street|Orchard Way|Church Hill|Harbour View|Elm Avenue".split(
    "|"
)

PRODUCTS: Final[dict[Category, tuple[str, ...]]] = {
    "electronics": ("Radio", "Headphones", "Camera", "Speaker", "Tablet"),
    "furniture": ("Armchair", "Bookshelf", "Desk", "Wardrobe", "Stool"),
    "clothing": ("Jacket", "Scarf", "Sweater", "Raincoat", "Boots"),
    "kitchen": ("Kettle", "Toaster", "Pan Set", "Teapot", "Blender"),
    "toys": ("Train Set", "Puzzle", "Dollhouse", "Kite", "Building Blocks"),
}

MAKES: Final = "Aurora Birch Cobalt Drift Ember Fjord Grove Haven Iris Juno".split()
COLOURS: Final = ("black", "blue", "green", "red", "white", "yellow")
SIZES: Final = ("size S", "size M", "size L", "size XL")
