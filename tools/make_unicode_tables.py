#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_tables.cpp: what the `tokenizers` library calls a letter, mark, number, punctuation, symbol or word.

Token ids depend on the Unicode version of the regex engine. The tables hold what `tokenizers` (Oniguruma, Unicode 16) has and
Unicode 14 (the oldest version of PCRE2 that is supported) has not. Asking the library itself keeps the tables true to it.
usage: .venv/bin/python tools/make_unicode_tables.py   (Python 3.11, whose unicodedata is version 14)"""
import pathlib
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

SCALARS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CATEGORIES = "LMNPS"


def category_members(category):
    keep_matches = pre_tokenizers.Split(Regex(rf"\p{{{category}}}+"), "removed", invert=True)
    return {ord(c) for piece, _ in keep_matches.pre_tokenize_str("".join(map(chr, SCALARS))) for c in piece}


def word_characters():
    """A single_word token is found behind c exactly if c is no word character."""
    tokenizer = Tokenizer(models.BPE({"\n": 0}, []))
    tokenizer.add_tokens([AddedToken("<mark>", single_word=True)])
    members = set()
    for c in SCALARS:
        text = chr(c) + "<mark>"
        if tokenizer.encode(text).ids[-1:] != [1]:
            members.add(c)
    return members


def ranges(members):
    out = []
    for c in sorted(members):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def table(name, members):
    cells = [f"{{0x{a:x}, 0x{b:x}}}," for a, b in ranges(members)]
    lines, line = [], "   "
    for cell in cells:
        if len(line) + 1 + len(cell) > 120:
            lines.append(line)
            line = "   "
        line += " " + cell
    return f"constexpr CodeRange {name}[] = {{\n" + "\n".join(lines + [line]) + "\n};\n"


def main():
    assert unicodedata.unidata_version == "14.0.0", "run with Python 3.11"
    out = [
        "// Written by tools/make_unicode_tables.py, not by hand.",
        '#include "base/error.h"',
        '#include "tokenizer/unicode.h"',
        "",
        "#include <algorithm>",
        "",
        "namespace plumb {",
        "namespace {",
        "",
        "// clang-format off",
    ]
    for category in CATEGORIES:
        old = {c for c in SCALARS if unicodedata.category(chr(c))[0] == category}
        new = category_members(category)
        assert old <= new, f"{category}: {sorted(old - new)} left the category: additions alone cannot express it"
        out.append(table("added_" + category, new - old))
    out.append(table("word", word_characters()))
    out += ["// clang-format on", "}  // namespace", ""]
    out += ["std::span<const CodeRange> assigned_since_unicode_14(char category) {", "  switch (category) {"]
    out += [f"    case '{c}':\n      return added_{c};" for c in CATEGORIES]
    out += [
        "  }",
        '  check_failed(__FILE__, __LINE__, "category is one of LMNPS", std::string(1, category));',
        "}",
        "",
        "bool is_word_character(char32_t c) {",
        "  const auto next = std::ranges::upper_bound(word, c, {}, &CodeRange::first);",
        "  return next != std::begin(word) && c <= std::prev(next)->last;",
        "}",
        "",
        "}  // namespace plumb",
    ]
    path = pathlib.Path(__file__).resolve().parent.parent / "src/tokenizer/unicode_tables.cpp"
    path.write_text("\n".join(out) + "\n")


main()
