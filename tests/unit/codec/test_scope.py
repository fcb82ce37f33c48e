"""Which class a stored exception is restored with: one that the functions can name."""

import functools
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, cast

import httpx
import pytest
import sqlalchemy

from perdure.codec import NOWHERE, ErrorScope, decode_cause, dumps, encode_cause, loads
from perdure.codec.scope import full_name
from perdure.errors import StepError


def module(name: str, **names: object) -> Any:
    """Return a module with these names; it is not in `sys.modules`."""
    created = ModuleType(name)
    vars(created).update(names)
    return created


def error_class(full: str, **attributes: object) -> type[Exception]:
    """Return an exception class as the module in its name would define it."""
    home, _, name = full.rpartition(".")
    cls = type(name, (Exception,), attributes)
    cls.__module__ = home
    return cls


def function(**names: object) -> Callable[..., None]:
    """Return a function whose module has these names."""

    def body() -> None:
        pass

    return FunctionType(body.__code__, names)


Declined = error_class("payments.Declined")
Other = error_class("refunds.Declined")


def find_class(name: str, *functions: object) -> object:
    return ErrorScope((), functions).find(name)


def test_a_class_is_found_in_the_module_of_a_function() -> None:
    assert find_class("payments.Declined", function(Declined=Declined)) is Declined


def test_a_class_is_found_under_another_name() -> None:
    """`from payments import Declined as NoMoney`."""
    assert find_class("payments.Declined", function(NoMoney=Declined)) is Declined


def test_a_class_is_found_as_an_attribute_of_a_module() -> None:
    """`import payments`, and `import payments as p`."""
    payments = module("payments", Declined=Declined)
    assert find_class("payments.Declined", function(payments=payments)) is Declined
    assert find_class("payments.Declined", function(p=payments)) is Declined


def test_a_class_is_found_in_a_module_that_passes_it_on() -> None:
    shop = module("shop", Declined=Declined)
    assert find_class("payments.Declined", function(shop=shop)) is Declined


def test_classes_of_real_packages_are_found() -> None:
    """One that a package passes on, and one in a submodule of a package."""
    fetch = function(httpx=httpx, sa=sqlalchemy)
    assert find_class(full_name(httpx.ReadTimeout), fetch) is httpx.ReadTimeout
    assert find_class("sqlalchemy.exc.IntegrityError", fetch) is sqlalchemy.exc.IntegrityError


def test_a_class_inside_a_class_is_found() -> None:
    """As `User.DoesNotExist` of an object-relational mapper."""
    missing = type("DoesNotExist", (Exception,), {"__qualname__": "User.DoesNotExist"})
    missing.__module__ = "models"
    user = type("User", (), {"DoesNotExist": missing, "__module__": "models"})
    assert find_class("models.User.DoesNotExist", function(User=user)) is missing


def test_a_module_that_is_bound_in_another_one_is_not_searched() -> None:
    """Only a submodule is, by the path in the class's name."""
    payments = module("payments", Declined=Declined)
    shop = module("shop", payments=payments)
    assert find_class("payments.Declined", function(shop=shop)) is None


def test_modules_that_bind_each_other_end_the_search() -> None:
    package, inner = module("pay"), module("pay.inner")
    package.inner, package.pay, inner.pay, inner.inner = inner, package, package, inner
    assert find_class("pay.inner.Declined", function(pay=package)) is None


def test_a_class_is_found_in_a_closure() -> None:
    """As in tests that define their classes in the test function."""

    class Local(Exception):
        pass

    def step() -> None:
        raise Local

    assert find_class(full_name(Local), step) is Local


def test_a_variable_of_a_closure_that_is_not_set_yet_is_skipped() -> None:
    def step() -> None:
        raise later

    assert find_class("nowhere.Missing", step) is None
    later = Declined()


def wrapped(fn: Callable[..., None]) -> Callable[..., None]:
    return functools.wraps(fn)(function())


class Service:
    pay = function(Declined=Declined)


class Payment:
    __call__ = Service.pay


CALLABLES: dict[str, Callable[[], object]] = {
    "decorated": lambda: wrapped(wrapped(Service.pay)),
    "partial": lambda: partial(partial(Service.pay)),
    "method": lambda: Service().pay,
    "partial of a decorated method": lambda: partial(wrapped(Service().pay)),
    "cached": lambda: functools.lru_cache(Service.pay),
    "callable": Payment,
    "class": lambda: type("Made", (), {"__init__": Service.pay}),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_the_function_inside_a_callable_counts(kind: str) -> None:
    assert find_class("payments.Declined", CALLABLES[kind]()) is Declined


def test_what_is_not_a_python_function_has_no_names() -> None:
    """A built-in, a class without `__init__`, and a decorator that leads in a circle."""
    circle = function(Declined=Declined)
    vars(circle)["__wrapped__"] = circle
    for callable_ in (print, len, type("Empty", (), {}), None):
        assert find_class("payments.Declined", callable_) is None
    assert find_class("payments.Declined", circle) is Declined


def test_classes_of_one_name_in_two_modules_are_distinguished() -> None:
    step = function(Declined=Declined, refunds=module("refunds", Declined=Other))
    assert find_class("payments.Declined", step) is Declined
    assert find_class("refunds.Declined", step) is Other


def test_a_class_that_was_moved_is_found_by_its_last_name() -> None:
    """If exactly one class of that name is bound directly."""
    assert find_class("old.payments.Declined", function(), function(NoMoney=Declined)) is Declined
    assert find_class("old.Declined", function(Declined=Declined), function(Declined=Declined))
    assert find_class("old.Declined", function(Declined=Declined), function(Declined=Other)) is None
    assert (
        find_class("old.Declined", function(payments=module("payments", Declined=Declined))) is None
    )


def test_a_declared_class_comes_first() -> None:
    copy = error_class("payments.Declined")
    assert ErrorScope([copy], [function(Declined=Declined)]).find("payments.Declined") is copy
    assert ErrorScope([Other], [function(Declined=Declined)]).find("old.Declined") is Other


def test_the_names_of_a_call_come_before_those_of_the_run() -> None:
    copy = error_class("payments.Declined")
    scope = ErrorScope((), [function(Declined=Declined)])
    assert scope.inside((), function(Declined=copy)).find("payments.Declined") is copy


@pytest.mark.parametrize("base", [StopIteration, KeyboardInterrupt, SystemExit, int])
def test_classes_that_would_stop_something_else_are_not_found(base: type) -> None:
    cls = type("Stop", (base,), {"__module__": "shop"})
    assert find_class("shop.Stop", function(Stop=cls)) is None


def test_nothing_is_imported_and_no_module_is_asked_for_attributes() -> None:
    """A lazy module stays as it is."""
    requested_names: list[str] = []

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            requested_names.append(name)
            return super().__getattribute__(name)

    lazy = Lazy("payments")
    lazy.__getattr__ = requested_names.append  # type: ignore[method-assign]  # as PEP 562 has it
    requested_names.clear()
    before = set(sys.modules)
    assert find_class("payments.Declined", function(payments=lazy)) is None
    assert find_class("xml.dom.minidom.Declined", function()) is None
    assert (requested_names, set(sys.modules)) == ([], before)


def test_hostile_objects_in_a_module_are_not_asked() -> None:
    """Neither a metaclass nor a proxy that has no value yet."""

    def refuse(*_: object) -> Any:
        raise RuntimeError("working outside of application context")

    class Meta(type):
        __getattribute__ = __eq__ = __hash__ = __subclasscheck__ = refuse

    proxy = type("Proxy", (), {"__class__": property(refuse), "__getattr__": refuse})()
    hostile = Meta("Declined", (Exception,), {})
    step = function(a=hostile, b=proxy, Declined=Declined)
    assert find_class("payments.Declined", step) is Declined
    is_found = ErrorScope((), [step]).contains(cast("type[Exception]", hostile))
    assert is_found


def test_the_full_name_is_stored_only_if_the_class_is_in_scope() -> None:
    """Another class of the same name must not take its place later."""
    step = function(Declined=Declined)
    assert encode_cause(Declined(), ErrorScope((), [step])).get("className") == "payments.Declined"
    assert "className" not in encode_cause(Other(), ErrorScope((), [step]))
    assert "className" not in encode_cause(ValueError(), ErrorScope((), [step]))
    restored = decode_cause(encode_cause(Other("x")), ErrorScope((), [step]))
    assert isinstance(restored, StepError)


def test_an_instance_is_rebuilt_without_init() -> None:
    """Whatever parameters it has; with its message, arguments and plain attributes."""

    class Refused(Exception):
        def __init__(self, order: str, *, amount: int) -> None:
            super().__init__(f"{order}: {amount}")
            self.amount = amount

    scope = ErrorScope((), [lambda: Refused])
    restored: Any = decode_cause(
        cast(Any, loads(dumps(encode_cause(Refused("7", amount=5), scope)))), scope
    )
    assert (type(restored), str(restored), restored.amount) == (Refused, "7: 5", 5)
    assert isinstance(decode_cause(encode_cause(Refused("7", amount=5)), NOWHERE), StepError)
