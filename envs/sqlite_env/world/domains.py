"""The domains: their vocabulary, and how each stores its data."""

# ruff: noqa: SIM905 - a string of words is easier to read than a list of them

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Amounts(StrEnum):
    """How the amount of an event is stored."""

    COLUMN = "column"
    """In a column, in euros."""
    CENTS = "cents"
    """In a column, in whole cents."""
    PRODUCT = "product"
    """Not at all: it is the product of units and unit price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One kind of database.

    Attributes:
        name: the unique name of the domain.
        about: the subject of the database, as in "a database of ...".
        words: the nouns and verbs used in questions and descriptions.
        tables: possible names of tables, by role.
        columns: possible names of columns, by role, for columns that are specific to the domain.
        groups: possible names of groups.
        first: possible first words of items' names.
        second: possible second words of items' names.
        statuses: statuses of events; the last one marks void events.
        units: the lowest and the highest number of units of an event.
        amounts: how amounts are stored.
        lines: whether an event is a line of a header, which holds the person, the day and the status.
        clocked: whether days are stored with the time of day.
        status_table: whether statuses are stored as numbers that refer to a separate table.
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

    @property
    def all_words(self) -> dict[str, str]:
        """The words, and the status of void events under the key "void"."""
        return {**self.words, "void": self.statuses[-1]}


_ROLES: Final = (
    "person people item items group groups event events line joined price units amount score used".split()
)


def _role_words(text: str) -> dict[str, str]:
    """Return the words of a domain by role."""
    return dict(zip(_ROLES, text.split(", "), strict=True))


SHOP: Final = Domain(
    name="shop",
    about="a mail-order shop",
    words=_role_words(
        "customer, customers, product, products, category, categories, order, orders, order line, "
        "signed up, list price, units, revenue, rating, ordered"
    ),
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
    first=tuple("Oak Steel Linen Amber Cobalt Folding Compact Rustic Velvet Granite".split()),
    second=tuple("Lamp Kettle Shelf Stool Basket Clock Tray Blanket Mirror Vase".split()),
    statuses=("delivered", "shipped", "open", "cancelled"),
    units=(1, 9),
    amounts=Amounts.PRODUCT,
    lines=True,
)

LIBRARY: Final = Domain(
    name="library",
    about="a public library",
    words=_role_words(
        "member, members, book, books, genre, genres, loan, loans, loan, joined, replacement cost, "
        "renewals, fees, review score, borrowed"
    ),
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
    first=tuple("Silent Crimson Hidden Winter Broken Golden Distant Paper Hollow Salt".split()),
    second=tuple("Harbour Orchard Letters Compass Bridge Garden Voyage Clockmaker Islands".split()),
    statuses=("returned", "on loan", "overdue", "voided"),
    units=(0, 6),
)

CLINIC: Final = Domain(
    name="clinic",
    about="a small clinic",
    words=_role_words(
        "patient, patients, treatment, treatments, department, departments, visit, visits, visit, "
        "registered, standard fee, minutes, billed fees, satisfaction score, received"
    ),
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
    first=tuple("Routine Extended Initial Advanced Paediatric Combined Remote Urgent Annual".split()),
    second=tuple("Check Scan Therapy Massage Consultation Screening Vaccination Cleaning".split()),
    statuses=("completed", "booked", "rescheduled", "no-show"),
    units=(10, 60),
    amounts=Amounts.CENTS,
    clocked=True,
)

RENTAL: Final = Domain(
    name="rental",
    about="a vehicle rental firm",
    words=_role_words(
        "driver, drivers, vehicle, vehicles, vehicle class, vehicle classes, rental, rentals, "
        "rental, opened their account, daily rate, rental days, takings, condition score, rented"
    ),
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
    first=tuple("Falcon Otter Lynx Heron Badger Puma Raven Marten Condor Bison".split()),
    second=tuple("Alpha Sport Cargo City Touring Plus Prime Cross Eco".split()),
    statuses=("closed", "running", "reserved", "annulled"),
    units=(1, 14),
    amounts=Amounts.PRODUCT,
    status_table=True,
)

SCHOOL: Final = Domain(
    name="school",
    about="an evening school",
    words=_role_words(
        "student, students, course, courses, faculty, faculties, enrolment, enrolments, enrolment, "
        "matriculated, course fee, hours attended, fees paid, grade, taken"
    ),
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
    first=tuple("Basic Practical Modern Applied Intensive Creative Everyday Classical Technical".split()),
    second=tuple("Spanish Pottery Statistics Guitar Accounting Yoga Logic Drawing Welding".split()),
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
