"""One query for each family of questions, over the views of `schema`. v_counted has the events that count.

They are written without a look at how the environment works out its answers, which uses no SQL.
"""

from typing import Final

QUERIES: Final[dict[str, str]] = {
    "count_in_city": "SELECT count(*) FROM v_people WHERE city = :CITY",
    "missing_email": "SELECT count(*) FROM v_people WHERE email IS NULL",
    "dearest_item": """
        SELECT i.name FROM v_items i JOIN v_groups g ON g.id = i.group_id
        WHERE g.name = :GROUP ORDER BY i.price DESC LIMIT 1""",
    "items_between": "SELECT count(*) FROM v_items WHERE price BETWEEN cast(:LOW AS REAL) AND cast(:HIGH AS REAL)",
    "joined_in_year": "SELECT count(*) FROM v_people WHERE strftime('%Y', joined) = :YEAR",
    "last_name_begins": """
        SELECT count(*) FROM v_people WHERE substr(name, instr(name, ' ') + 1, 1) BETWEEN :LETTER AND :LAST""",
    "names_with_word": "SELECT name FROM v_items WHERE name LIKE '% ' || :WORD",
    "largest_group": """
        SELECT g.name FROM v_items i JOIN v_groups g ON g.id = i.group_id
        GROUP BY g.id ORDER BY count(*) DESC LIMIT 1""",
    "units_of_item": """
        SELECT sum(e.units) FROM v_counted e JOIN v_items i ON i.id = e.item_id WHERE i.name = :ITEM""",
    "amount_in_month": """
        SELECT round(sum(amount), 2) FROM v_counted WHERE strftime('%m %Y', day) = :MONTH || ' ' || :YEAR""",
    "never_used": "SELECT name FROM v_items WHERE id NOT IN (SELECT item_id FROM v_counted)",
    "idle_in_city": """
        SELECT count(*) FROM v_people p LEFT JOIN v_counted e ON e.person_id = p.id
        WHERE p.city = :CITY AND e.header IS NULL""",
    "at_least": """
        SELECT count(*) FROM (SELECT person_id FROM v_counted GROUP BY person_id
        HAVING count(DISTINCT header) >= cast(:COUNT AS INTEGER))""",
    "average_score": """
        SELECT round(avg(e.score), 2) FROM v_counted e JOIN v_items i ON i.id = e.item_id WHERE i.name = :ITEM""",
    "top_items": """
        SELECT i.name FROM v_counted e JOIN v_items i ON i.id = e.item_id
        GROUP BY i.id ORDER BY sum(e.units) DESC, i.name LIMIT cast(:COUNT AS INTEGER)""",
    "busiest_month": """
        SELECT substr(day, 1, 7) AS month FROM v_counted WHERE substr(day, 1, 4) = :YEAR
        GROUP BY month ORDER BY count(DISTINCT header) DESC, month LIMIT 1""",
    "different_items": """
        SELECT count(DISTINCT e.item_id) FROM v_counted e JOIN v_people p ON p.id = e.person_id
        WHERE p.name = :PERSON""",
    "on_weekday": "SELECT count(DISTINCT header) FROM v_counted WHERE strftime('%w', day) = :WEEKDAY",
    "best_city": """
        SELECT p.city FROM v_counted e JOIN v_people p ON p.id = e.person_id
        GROUP BY p.city ORDER BY sum(e.amount) DESC LIMIT 1""",
    "events_by_group": """
        SELECT g.name, count(DISTINCT e.header) FROM v_counted e JOIN v_items i ON i.id = e.item_id
        JOIN v_groups g ON g.id = i.group_id WHERE substr(e.day, 1, 4) = :YEAR GROUP BY g.id""",
    "rank_in_group": """
        SELECT name FROM (SELECT i.name, rank() OVER (ORDER BY sum(e.amount) DESC) AS place
        FROM v_counted e JOIN v_items i ON i.id = e.item_id JOIN v_groups g ON g.id = i.group_id
        WHERE g.name = :GROUP GROUP BY i.id) WHERE place = cast(:NTH AS INTEGER)""",
    "best_of_each_group": """
        SELECT g.name, max(t.total) FROM (SELECT item_id, sum(units) AS total FROM v_counted GROUP BY item_id) t
        JOIN v_items i ON i.id = t.item_id JOIN v_groups g ON g.id = i.group_id GROUP BY g.id""",
    "longest_gap": """
        SELECT p.name FROM (SELECT person_id, julianday(day) - julianday(lag(day) OVER
        (PARTITION BY person_id ORDER BY day)) AS gap FROM v_counted) t
        JOIN v_people p ON p.id = t.person_id WHERE gap IS NOT NULL ORDER BY gap DESC LIMIT 1""",
    "above_group_average": """
        SELECT count(*) FROM (SELECT price, avg(price) OVER (PARTITION BY group_id) AS mean FROM v_items)
        WHERE price > mean""",
    "amount_of_largest_city": """
        SELECT round(sum(e.amount), 2) FROM v_counted e JOIN v_people p ON p.id = e.person_id
        WHERE substr(e.day, 1, 4) = :YEAR AND p.city =
        (SELECT city FROM v_people GROUP BY city ORDER BY count(*) DESC LIMIT 1)""",
    "used_both": """
        SELECT name FROM v_people WHERE id IN (SELECT e.person_id FROM v_counted e JOIN v_items i ON i.id = e.item_id
        WHERE i.name = :ITEM INTERSECT SELECT e.person_id FROM v_counted e JOIN v_items i ON i.id = e.item_id
        WHERE i.name = :OTHER)""",
    "greatest_growth": """
        SELECT g.name FROM v_counted e JOIN v_items i ON i.id = e.item_id JOIN v_groups g ON g.id = i.group_id
        GROUP BY g.id ORDER BY sum(CASE substr(e.day, 1, 4) WHEN :NEXT THEN e.units WHEN :YEAR THEN -e.units ELSE 0 END)
        DESC LIMIT 1""",
    "share_of_status": """
        SELECT round(100.0 * count(DISTINCT CASE WHEN status = :STATUS THEN header END) / count(DISTINCT header), 1)
        FROM v_events WHERE substr(day, 1, 4) = :YEAR""",
    "with_archive": """
        SELECT (SELECT count(DISTINCT e.header) FROM v_counted e WHERE e.person_id = p.id)
        + (SELECT count(*) FROM v_counted_archive a WHERE a.person_id = p.id) FROM v_people p WHERE p.name = :PERSON""",
    "soon_after_joining": """
        SELECT count(*) FROM (SELECT p.id FROM v_people p JOIN v_counted e ON e.person_id = p.id GROUP BY p.id
        HAVING julianday(min(e.day)) - julianday(p.joined) <= cast(:DAYS AS INTEGER))""",
    "running_total": """
        SELECT day FROM (SELECT day, sum(sum(amount)) OVER (ORDER BY day) AS total FROM v_counted
        WHERE substr(day, 1, 4) = :YEAR GROUP BY day) WHERE total >= cast(:SUM AS REAL) ORDER BY day LIMIT 1""",
    "above_average_people": """
        SELECT count(*) FROM (SELECT n, avg(n) OVER () AS mean FROM
        (SELECT count(DISTINCT header) AS n FROM v_counted GROUP BY person_id)) WHERE n > mean""",
}
