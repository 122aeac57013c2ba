"""Numbers as a reader should see them: as many digits as their error justifies, and never a bare ``nan``."""

from __future__ import annotations

import math

__all__ = ["brief", "count", "interval", "percentage", "plus_minus", "shorten", "signed", "tick_label"]

MINUS, TIMES, INFINITY = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{INFINITY}"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def interval(value: float, low: float, high: float) -> tuple[str, str]:
    """A signed value and its interval, in one number of decimals and one power of ten.

    Half the interval keeps two significant digits, and the rest follows.

    Example:
        >>> interval(12.3456, 11.92, 12.77)
        ('+12.35', '11.92 to 12.77')
        >>> interval(-3.2e-7, -3.4e-7, -3.0e-7)
        ('−3.20×10⁻⁷', '(−3.40 to −3.00)×10⁻⁷')
    """
    power = _power(value, low, high)
    decimals = _decimals((high - low) / 2, max(_size(value), _size(low), _size(high)), power)
    middle = _fixed(value, power, decimals, plus=True) + _exponent(power, value)
    if math.isnan(low) and math.isnan(high):
        return middle, "no interval"
    ends = f"{_fixed(low, power, decimals)} to {_fixed(high, power, decimals)}"
    return middle, f"({ends}){_exponent(power)}" if power else ends


def plus_minus(value: float, error: float) -> str:
    """A value and its standard error.

    Example:
        >>> plus_minus(1234.5, 67.8), plus_minus(0.25, 0.0)
        ('1,234 ± 68', '0.2500')
    """
    power = _power(value, error)
    decimals = _decimals(error, _size(value), power)
    middle = _fixed(value, power, decimals)
    if error == 0:
        return middle + _exponent(power, value)
    both = f"{middle} ± {_fixed(error, power, decimals)}"
    return f"({both}){_exponent(power)}" if power else both


def signed(value: float, digits: int = 3) -> str:
    """A value with its sign, to so many significant digits.

    Example:
        >>> signed(0.01234), signed(-5e-9), signed(0.0), signed(math.nan)
        ('+0.0123', '−5.00×10⁻⁹', '0', 'NaN')
    """
    return _significant(value, digits, plus=True)


def brief(value: float, digits: int = 4) -> str:
    """A value to so many significant digits; whole numbers whole.

    Example:
        >>> brief(64.0), brief(0.0123456), brief(2.5e-7, 2)
        ('64', '0.01235', '2.5×10⁻⁷')
        >>> brief(0.0038700)
        '0.00387'
    """
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}".replace("-", MINUS)
    text, times, power = _significant(value, digits, plus=False).partition(TIMES)
    return (text.rstrip("0").rstrip(".") if "." in text else text) + times + power


def count(value: int) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,}".replace("-", MINUS)


def percentage(share: float, digits: int = 3) -> str:
    """A share as a percentage.

    Example:
        >>> percentage(0.95), percentage(0.12345), percentage(math.nan)
        ('95%', '12.3%', 'NaN')
    """
    if not math.isfinite(share):
        return _special(share, plus=False)
    return f"{100 * share:.{digits}g}%".replace("-", MINUS) if abs(share) < 10 else f"{100 * share:,.0f}%"


def tick_label(value: float) -> str:
    """A round value at an axis, short.

    Example:
        >>> tick_label(-1000.0), tick_label(0.25), tick_label(1e-7), tick_label(-2e6)
        ('−1,000', '0.25', '10⁻⁷', '−2×10⁶')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return brief(value)
    power = math.floor(math.log10(abs(value)) + 1e-9)
    factor = brief(value / 10.0**power, 3)
    return (f"{factor}{TIMES}" if factor.strip(MINUS) != "1" else factor[:-1]) + _ten_to(power)


def shorten(text: str, width: int, *, end: bool = False) -> str:
    """Text on one line of at most so many characters: its beginning, or its end.

    Example:
        >>> shorten("one  two three", 8), shorten("one two three", 8, end=True)
        ('one two…', '…o three')
    """
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    return f"…{text[1 - width :]}" if end else f"{text[: width - 1]}…"


# --- parts ---------------------------------------------------------------------------------------------------


def _size(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0


def _power(*values: float) -> int:
    """The power of ten to take out: none for numbers that read well without."""
    size = max(map(_size, values))
    return 0 if size == 0 or 1e-3 <= size < 1e6 else math.floor(math.log10(size))


def _decimals(error: float, size: float, power: int) -> int:
    """Decimals that leave two digits of the error; four digits of the value where no error is known."""
    if math.isfinite(error) and error > 0:
        decimals = 1 - math.floor(math.log10(error)) + power
    elif size > 0:
        decimals = 3 - math.floor(math.log10(size)) + power
    else:
        decimals = 1
    return min(decimals, 6)


def _fixed(value: float, power: int, decimals: int, *, plus: bool = False) -> str:
    if not math.isfinite(value):
        return _special(value, plus=plus)
    number = round(value / 10.0**power, decimals)
    sign = MINUS if number < 0 else "+" if plus and number > 0 else ""
    return f"{sign}{abs(number):,.{max(decimals, 0)}f}"


def _exponent(power: int, value: float = 1.0) -> str:
    return TIMES + _ten_to(power) if power and math.isfinite(value) else ""


def _ten_to(power: int) -> str:
    return "10" + str(power).translate(_SUPERSCRIPTS)


def _significant(value: float, digits: int, *, plus: bool) -> str:
    if not math.isfinite(value):
        return _special(value, plus=plus)
    if value == 0:
        return "0"
    power = _power(value)
    decimals = digits - 1 - math.floor(math.log10(abs(value))) + power
    return _fixed(value, power, decimals, plus=plus) + _exponent(power)


def _special(value: float, *, plus: bool) -> str:
    if math.isnan(value):
        return "NaN"
    return (MINUS if value < 0 else "+" if plus else "") + INFINITY
