"""The domains that there are: their words, and how each stores things."""

# ruff: noqa: SIM905 - words in a row are read more easily than a list of them

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Amounts(StrEnum):
    """How what an event came to is stored."""

    COLUMN = "column"
    """A column of euros."""
    CENTS = "cents"
    """A column of whole cents."""
    PRODUCT = "product"
    """Nowhere: units times the price of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One kind of database.

    Attributes:
        name: its key.
        about: what the database is of, as in "a database of ...".
        words: the nouns and verbs that questions and descriptions are made of.
        tables: by role, the names that a table may have.
        columns: by role, the names that a column may have, where they are the domain's own.
        groups: names of groups.
        first: first words of the items' names.
        second: their other words.
        statuses: of events; the last is the one of events that came to nothing.
        units: from and to.
        amounts: how amounts are stored.
        lines: an event is a line of a header, which has the person, the day and the status.
        clocked: days are stored with the time.
        status_table: statuses are numbers, with a table of their own.
    """

    name: str
    about: str
    words: Mapping[str, str]
    tables: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    groups: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]
    statuses: tuple[str, ...]
    units: tuple[int, int]
    amounts: Amounts = Amounts.COLUMN
    lines: bool = False
    clocked: bool = False
    status_table: bool = False
    all_words: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_words", {**self.words, "void": self.statuses[-1]})


SHOP: Final = Domain(
    name="shop",
    about="a mail-order shop",
    words={
        "person": "customer",
        "people": "customers",
        "item": "product",
        "items": "products",
        "group": "category",
        "groups": "categories",
        "event": "order",
        "events": "orders",
        "line": "order line",
        "joined": "signed up",
        "price": "list price",
        "units": "units",
        "amount": "revenue",
        "score": "rating",
        "used": "ordered",
    },
    tables={
        "people": ("customers", "clients", "accounts"),
        "groups": ("categories", "product_groups"),
        "items": ("products", "articles", "catalogue"),
        "headers": ("orders", "sales_orders", "purchases"),
        "events": ("order_lines", "order_items", "positions"),
        "archive": ("orders_archive", "old_orders"),
        "staff": ("employees", "staff"),
    },
    columns={
        "person.joined": ("signed_up_on", "created_on", "signup_date"),
        "item.price": ("list_price", "price", "retail_price"),
        "event.units": ("quantity", "qty", "pieces"),
        "event.unit_price": ("unit_price", "price_each"),
        "event.score": ("rating", "stars"),
    },
    groups=("Lamps", "Kitchen", "Garden", "Office", "Toys", "Textiles", "Tools", "Sports"),
    first=("Oak", "Steel", "Linen", "Amber", "Cobalt", "Folding", "Compact", "Rustic", "Velvet", "Granite"),
    second=("Lamp", "Kettle", "Shelf", "Stool", "Basket", "Clock", "Tray", "Blanket", "Mirror", "Vase"),
    statuses=("delivered", "shipped", "open", "cancelled"),
    units=(1, 9),
    amounts=Amounts.PRODUCT,
    lines=True,
)

LIBRARY: Final = Domain(
    name="library",
    about="a public library",
    words={
        "person": "member",
        "people": "members",
        "item": "book",
        "items": "books",
        "group": "genre",
        "groups": "genres",
        "event": "loan",
        "events": "loans",
        "line": "loan",
        "joined": "joined",
        "price": "replacement cost",
        "units": "renewals",
        "amount": "fees",
        "score": "review score",
        "used": "borrowed",
    },
    tables={
        "people": ("members", "readers", "borrowers"),
        "groups": ("genres", "subjects"),
        "items": ("books", "titles", "holdings"),
        "events": ("loans", "checkouts", "lendings"),
        "archive": ("loans_archive", "former_loans"),
        "staff": ("librarians", "staff"),
    },
    columns={
        "person.joined": ("member_since", "joined_on", "registered"),
        "item.price": ("replacement_cost", "cost", "book_value"),
        "event.units": ("renewals", "times_renewed", "extensions"),
        "event.amount": ("fee", "fees_charged", "charge"),
        "event.score": ("review_score", "review"),
    },
    groups=("Mystery", "History", "Poetry", "Science", "Travel", "Fantasy", "Biography", "Cooking"),
    first=("Silent", "Crimson", "Hidden", "Winter", "Broken", "Golden", "Distant", "Paper", "Hollow", "Salt"),
    second=(
        "Harbour",
        "Orchard",
        "Letters",
        "Compass",
        "Bridge",
        "Garden",
        "Voyage",
        "Clockmaker",
        "Islands",
    ),
    statuses=("returned", "on loan", "overdue", "voided"),
    units=(0, 6),
)

CLINIC: Final = Domain(
    name="clinic",
    about="a small clinic",
    words={
        "person": "patient",
        "people": "patients",
        "item": "treatment",
        "items": "treatments",
        "group": "department",
        "groups": "departments",
        "event": "visit",
        "events": "visits",
        "line": "visit",
        "joined": "registered",
        "price": "standard fee",
        "units": "minutes",
        "amount": "billed fees",
        "score": "satisfaction score",
        "used": "received",
    },
    tables={
        "people": ("patients", "persons", "patient_register"),
        "groups": ("departments", "wards"),
        "items": ("treatments", "services", "procedures"),
        "events": ("visits", "appointments", "consultations"),
        "archive": ("visits_archive", "past_visits"),
        "staff": ("doctors", "staff"),
    },
    columns={
        "person.joined": ("registered_on", "first_registered", "registration_date"),
        "item.price": ("standard_fee", "tariff", "base_fee"),
        "event.units": ("minutes", "duration_min", "length_minutes"),
        "event.amount": ("fee_cents", "billed_cents", "amount_cents"),
        "event.score": ("satisfaction", "feedback_score"),
    },
    groups=("Dental", "Cardiology", "Dermatology", "Orthopaedics", "Neurology", "Nutrition", "Radiology"),
    first=(
        "Routine",
        "Extended",
        "Initial",
        "Advanced",
        "Paediatric",
        "Combined",
        "Remote",
        "Urgent",
        "Annual",
    ),
    second=("Check", "Scan", "Therapy", "Massage", "Consultation", "Screening", "Vaccination", "Cleaning"),
    statuses=("completed", "booked", "rescheduled", "no-show"),
    units=(10, 60),
    amounts=Amounts.CENTS,
    clocked=True,
)

RENTAL: Final = Domain(
    name="rental",
    about="a vehicle rental firm",
    words={
        "person": "driver",
        "people": "drivers",
        "item": "vehicle",
        "items": "vehicles",
        "group": "vehicle class",
        "groups": "vehicle classes",
        "event": "rental",
        "events": "rentals",
        "line": "rental",
        "joined": "opened their account",
        "price": "daily rate",
        "units": "rental days",
        "amount": "takings",
        "score": "condition score",
        "used": "rented",
    },
    tables={
        "people": ("drivers", "renters", "clients"),
        "groups": ("vehicle_classes", "classes"),
        "items": ("vehicles", "fleet", "cars"),
        "events": ("rentals", "hires", "contracts"),
        "statuses": ("rental_statuses", "status_codes"),
        "archive": ("rentals_archive", "closed_contracts"),
        "staff": ("agents", "staff"),
    },
    columns={
        "person.joined": ("account_opened", "opened_on", "since"),
        "item.price": ("daily_rate", "rate_per_day", "rate"),
        "event.units": ("days", "rental_days", "num_days"),
        "event.unit_price": ("rate_charged", "agreed_rate"),
        "event.score": ("condition_score", "return_condition"),
    },
    groups=("Compact", "Estate", "Van", "Convertible", "Electric", "Luxury", "Minibus"),
    first=("Falcon", "Otter", "Lynx", "Heron", "Badger", "Puma", "Raven", "Marten", "Condor", "Bison"),
    second=("Alpha", "Sport", "Cargo", "City", "Touring", "Plus", "Prime", "Cross", "Eco"),
    statuses=("closed", "running", "reserved", "annulled"),
    units=(1, 14),
    amounts=Amounts.PRODUCT,
    status_table=True,
)

SCHOOL: Final = Domain(
    name="school",
    about="an evening school",
    words={
        "person": "student",
        "people": "students",
        "item": "course",
        "items": "courses",
        "group": "faculty",
        "groups": "faculties",
        "event": "enrolment",
        "events": "enrolments",
        "line": "enrolment",
        "joined": "matriculated",
        "price": "course fee",
        "units": "hours attended",
        "amount": "fees paid",
        "score": "grade",
        "used": "taken",
    },
    tables={
        "people": ("students", "learners", "participants"),
        "groups": ("faculties", "schools"),
        "items": ("courses", "classes", "modules"),
        "events": ("enrolments", "course_bookings", "registrations"),
        "archive": ("enrolments_archive", "earlier_enrolments"),
        "staff": ("teachers", "staff"),
    },
    columns={
        "person.joined": ("matriculated_on", "start_date", "entry_date"),
        "item.price": ("course_fee", "fee", "tuition"),
        "event.units": ("hours_attended", "attended_hours", "hours"),
        "event.amount": ("fee_paid", "paid", "amount_paid"),
        "event.score": ("grade", "mark"),
    },
    groups=("Languages", "Crafts", "Computing", "Music", "Economics", "Health", "Philosophy", "Design"),
    first=(
        "Basic",
        "Practical",
        "Modern",
        "Applied",
        "Intensive",
        "Creative",
        "Everyday",
        "Classical",
        "Technical",
    ),
    second=(
        "Spanish",
        "Pottery",
        "Statistics",
        "Guitar",
        "Accounting",
        "Yoga",
        "Logic",
        "Drawing",
        "Welding",
    ),
    statuses=("finished", "active", "waiting", "withdrawn"),
    units=(2, 40),
)

DOMAINS: Final = (SHOP, LIBRARY, CLINIC, RENTAL, SCHOOL)


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
