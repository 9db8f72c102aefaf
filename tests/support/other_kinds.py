"Values of JSON, each replaced by each other kind"

KINDS = [None, True, 7, -1, 0.5, 'text', [], [1], ['a'], {}, {'a': 1}]


def places(d, at=()):
    "Where the values of nested data are; of a list the first"
    yield at
    items = d.items() if isinstance(d, dict) else enumerate(d[:1]) if isinstance(d, list) else ()
    for k, v in list(items)[:60]:
        yield from places(v, (*at, k))


def changed(d, at, value):
    "A copy with another value there"
    if not at:
        return value
    d = list(d) if isinstance(d, (list, tuple)) else dict(d)
    d[at[0]] = changed(d[at[0]], at[1:], value)
    return d
