//! Jinja's functions whose result may be much longer than what they are given: what it will take is known before it is made.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, StringInput, Value, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use minijinja_contrib::pycompat;

use super::meter;
use crate::bounds::TEMPLATE_WIDTH;

/// Bytes of an element of a list.
const ELEMENT: usize = 32;

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("indent", indent);
    environment.add_filter("format", format);
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("map", map);
    environment.add_filter("trim", |text: StringInput<'_>, letters: Option<Cow<'_, str>>| {
        trimmed(text.as_str(), letters.as_deref())?;
        Ok::<_, Error>(filters::trim(text, letters))
    });
    add_choices(environment);
    environment.add_filter("batch", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        meter::fits(count.saturating_mul(ELEMENT))?;
        filters::batch(state, value, count, fill)
    });
    environment.add_filter("slice", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        meter::fits(count.saturating_mul(2 * ELEMENT))?;
        filters::slice(state, value, count, fill)
    });
    // None of Jinja2's: nothing is made for templates of transformers.
    environment.remove_filter("chain");
    environment.remove_filter("zip");
    environment.remove_filter("pprint");
    environment.remove_global("debug");
}

/// Filters that test each item of a list.
fn add_choices(environment: &mut Environment<'static>) {
    type Name<'n> = Option<Cow<'n, str>>;
    type Arguments = Rest<ValueOrKwargs>;
    environment.add_filter("select", |state: &mut State, values: Value, test: Name, arguments: Arguments| {
        chosen(&values, &arguments)?;
        filters::select(state, values, test, arguments)
    });
    environment.add_filter("reject", |state: &mut State, values: Value, test: Name, arguments: Arguments| {
        chosen(&values, &arguments)?;
        filters::reject(state, values, test, arguments)
    });
    environment.add_filter(
        "selectattr",
        |state: &mut State, values: Value, key: Cow<str>, test: Name, arguments: Arguments| {
            chosen(&values, &arguments)?;
            filters::selectattr(state, values, key, test, arguments)
        },
    );
    environment.add_filter(
        "rejectattr",
        |state: &mut State, values: Value, key: Cow<str>, test: Name, arguments: Arguments| {
            chosen(&values, &arguments)?;
            filters::rejectattr(state, values, key, test, arguments)
        },
    );
}

/// Each item is tested, with the same arguments.
fn chosen(values: &Value, arguments: &Rest<ValueOrKwargs>) -> Result<(), Error> {
    meter::iterated(values)?;
    meter::searched(values)?;
    let items = values.len().unwrap_or_default();
    for argument in &arguments.0 {
        meter::charge(meter::shown(argument)?.saturating_mul(items) / 2)?;
    }
    Ok(())
}

/// Each character is compared with all of `letters`.
fn trimmed(text: &str, letters: Option<&str>) -> Result<(), Error> {
    meter::charge(text.len().saturating_mul(letters.map_or(1, |letters| letters.len().max(1))) / 2)
}

pub(super) fn check(width: usize) -> Result<(), Error> {
    if width <= TEMPLATE_WIDTH {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("expected a width of at most {TEMPLATE_WIDTH}, got {width}")))
}

/// `left * right`, where one is a text or a list.
pub(super) fn repeated(left: &Value, right: &Value) -> Result<(), Error> {
    for (value, count) in [(left, right), (right, left)] {
        let each = match value.as_str() {
            Some(text) => text.len(),
            None if value.as_object().is_some() => value.len().unwrap_or_default().saturating_mul(ELEMENT),
            None => continue,
        };
        meter::fits(each.saturating_mul(count.as_usize().unwrap_or_default()))?;
    }
    Ok(())
}

/// Jinja's `indent`.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let columns = width.or(options.peek("width")?).unwrap_or_default();
    check(columns)?;
    let lines = text.as_str().bytes().filter(|byte| *byte == b'\n').count() + 1;
    meter::fits(lines.saturating_mul(columns).saturating_add(text.as_str().len()))?;
    filters::indent(text, width, first, blank, options)
}

/// Jinja's `format`: `"%5d" | format(3)`.
fn format(state: &mut State, text: &Value, values: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let format = text.as_str().unwrap_or_default();
    printf_specs(format).try_for_each(check_spec)?;
    formatted(format, '%', format.contains('*'), values.0.iter().map(|value| &**value))?;
    filters::format(state, text, values)
}

/// What a format with so many fields may become.
fn formatted<'v>(
    format: &str,
    field: char,
    has_widths_in_values: bool,
    values: impl Iterator<Item = &'v Value>,
) -> Result<(), Error> {
    let mut longest = 0;
    for value in values {
        if has_widths_in_values {
            check(value.as_usize().unwrap_or_default())?;
        }
        longest = meter::shown(value)?.max(longest);
    }
    let widest =
        if format.bytes().any(|byte| byte.is_ascii_digit()) || has_widths_in_values { TEMPLATE_WIDTH } else { 0 };
    let fields = format.matches(field).count();
    meter::fits(fields.saturating_mul(longest.saturating_add(widest)).saturating_add(format.len()))
}

/// Jinja's `replace`.
fn replace(
    state: &mut State,
    text: StringInput<'_>,
    from: StringInput<'_>,
    to: StringInput<'_>,
) -> Result<Value, Error> {
    replaced(text.as_str(), from.as_str(), to.as_str())?;
    filters::replace(state, text, from, to)
}

fn replaced(text: &str, from: &str, to: &str) -> Result<(), Error> {
    if to.len() <= from.len() {
        return Ok(());
    }
    let found = text.matches(from).count();
    meter::fits(found.saturating_mul(to.len()).saturating_add(text.len()))
}

/// Jinja's `join`.
fn join(
    state: &mut State,
    values: &Value,
    joiner: Option<StringInput<'_>>,
    attribute: Option<&str>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named = options.peek::<Option<&str>>("d").ok().flatten().map_or(0, str::len);
    joined(values, joiner.as_ref().map_or(named, |joiner| joiner.as_str().len()))?;
    filters::join(state, values, joiner, attribute, options)
}

fn joined(values: &Value, joiner: usize) -> Result<(), Error> {
    meter::iterated(values)?;
    meter::fits(meter::shown(values)?.saturating_add(values.len().unwrap_or_default().saturating_mul(joiner)))
}

/// Jinja's `map`: each value that its filter makes counts at once.
fn map(state: &mut State, values: Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    if arguments.0.first().is_none_or(|name| name.as_str().is_none()) {
        return filters::map(state, values, arguments).map(Value::from);
    }
    let plain = arguments.into_values();
    let filter = plain[0].as_str().unwrap_or_default();
    let mapped = values.try_iter()?.map(|value| {
        let arguments: Vec<Value> = std::iter::once(value).chain(plain[1..].iter().cloned()).collect();
        meter::read(&arguments[0])?;
        let value = state.apply_filter(filter, &arguments)?;
        meter::made(&value).map(|()| value)
    });
    mapped.collect::<Result<Vec<_>, _>>().map(Value::from)
}

/// Python's methods, such as `"{:5}".format(3)`.
fn method(state: &mut State, value: &Value, name: &str, values: &[Value]) -> Result<Value, Error> {
    meter::read(value)?;
    values.iter().try_for_each(meter::compared)?;
    match (name, value.as_str(), values) {
        ("strip" | "lstrip" | "rstrip", Some(text), [letters]) => trimmed(text, letters.as_str())?,
        ("format", Some(text), _) => {
            let fields = text.split('{').skip(1).filter_map(|rest| rest.split('}').next()?.split_once(':'));
            fields.map(|(_, spec)| spec).try_for_each(check_spec)?;
            formatted(text, '{', text.contains(":{"), values.iter())?;
        }
        ("replace", Some(text), [from, to, ..]) => {
            replaced(text, from.as_str().unwrap_or_default(), to.as_str().unwrap_or_default())?;
        }
        ("join", Some(text), [values]) => joined(values, text.len())?,
        _ => {}
    }
    pycompat::unknown_method_callback(state, value, name, values)
}

/// What follows each `%`, and its `(name)`, up to the letter of its type.
fn printf_specs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, spec) = rest.split_once('%')?;
        let spec = spec.strip_prefix('(').and_then(|named| named.split_once(')')).map_or(spec, |(_, spec)| spec);
        let end = spec.find(|letter: char| letter == '%' || letter.is_alphabetic()).unwrap_or(spec.len());
        rest = spec.get(end + 1..).unwrap_or_default();
        Some(&spec[..end])
    })
}

fn check_spec(spec: &str) -> Result<(), Error> {
    let numbers = spec.split(|letter: char| !letter.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).try_for_each(check)
}
