//! Jinja's functions that take a width, with a limit: a template that asks for more memory than there is ends as an error.

use crate::bounds::TEMPLATE_WIDTH;
use minijinja::value::{Kwargs, Rest, StringInput, Value, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State, filters};
use minijinja_contrib::pycompat;

pub(super) fn check(width: usize) -> Result<(), Error> {
    if width <= TEMPLATE_WIDTH {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("expected a width of at most {TEMPLATE_WIDTH}, got {width}")))
}

/// Jinja's `indent`.
pub(super) fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    check(width.or(options.peek("width")?).unwrap_or_default())?;
    filters::indent(text, width, first, blank, options)
}

/// Jinja's `format`: `"%5d" | format(3)`.
pub(super) fn format(state: &mut State, text: &Value, values: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    printf_specs(text.as_str().unwrap_or_default()).try_for_each(check_spec)?;
    filters::format(state, text, values)
}

/// Python's methods, such as `"{:5}".format(3)`.
pub(super) fn method(state: &mut State, value: &Value, name: &str, values: &[Value]) -> Result<Value, Error> {
    if let ("format", Some(text)) = (name, value.as_str()) {
        let fields = text.split('{').skip(1).filter_map(|rest| rest.split('}').next()?.split_once(':'));
        fields.map(|(_, spec)| spec).try_for_each(check_spec)?;
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
