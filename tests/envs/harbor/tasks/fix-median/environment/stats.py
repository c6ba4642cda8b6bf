def mean(values):
    return sum(values) / len(values)


def median(values):
    return sorted(values)[len(values) // 2]
