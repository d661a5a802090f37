//! What one rendering makes and reads, against its bounds. Every value that a template makes passes [`made`] before the template can use it
//! again, so that texts cannot double for ever, and values are neither deep nor wide enough to overflow a stack when they are shown, compared or
//! dropped. The meter is the thread's: a rendering stays on its thread.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::bounds::{TEMPLATE_DEPTH, TEMPLATE_HELD_BYTES, TEMPLATE_MADE_BYTES, TEMPLATE_VALUE_BYTES};

/// A shorter text counts in full where it is made. Of longer ones only those are held that are still used: a template may build its whole
/// output by appending to a text.
const LONG: usize = 64 << 10;

/// Texts are copied and compared by some gigabytes a second.
const COPY_SHARE: usize = 32;

/// And read character by character by some hundred megabytes a second.
const READ_SHARE: usize = 2;

/// Bytes of an element of a list or dict, beside what it holds.
const ELEMENT: usize = 32;

/// Bytes that each byte of the conversation allows beside a bound.
const OF_INPUT: usize = 16;

thread_local! {
    static METER: RefCell<Meter> = const { RefCell::new(Meter::EMPTY) };
}

struct Meter {
    /// Bytes of the conversation.
    input: usize,
    made: usize,
    /// Long texts, of which some may no longer be used.
    long: Vec<Weak<str>>,
    long_bytes: usize,
    /// The first bound that was exceeded.
    exceeded: Option<String>,
}

impl Meter {
    const EMPTY: Self = Self { input: 0, made: 0, long: Vec::new(), long_bytes: 0, exceeded: None };

    fn bound(&self, bytes: usize) -> usize {
        bytes.saturating_add(self.input.saturating_mul(OF_INPUT))
    }

    fn exceed(&mut self, what: &str, bytes: usize) -> Error {
        let message = format!("{what} take more than {} MiB", self.bound(bytes) >> 20);
        refused(&mut self.exceeded, message)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        self.made = self.made.saturating_add(bytes);
        if self.made <= self.bound(TEMPLATE_MADE_BYTES) {
            return Ok(());
        }
        Err(self.exceed("all its texts and values", TEMPLATE_MADE_BYTES))
    }

    fn hold(&mut self, text: &Arc<str>) -> Result<(), Error> {
        self.charge(text.len() / COPY_SHARE)?;
        self.long_bytes += text.len();
        self.long.push(Arc::downgrade(text));
        if self.long_bytes > self.bound(TEMPLATE_HELD_BYTES) {
            self.long.retain(|text| text.strong_count() > 0);
            self.long_bytes = self.long.iter().filter_map(Weak::upgrade).map(|text| text.len()).sum();
        }
        if self.long_bytes <= self.bound(TEMPLATE_HELD_BYTES) {
            return Ok(());
        }
        Err(self.exceed("the texts that it holds", TEMPLATE_HELD_BYTES))
    }
}

fn refused(exceeded: &mut Option<String>, message: String) -> Error {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    exceeded.get_or_insert(message);
    error
}

/// Runs a rendering of `input` bytes; if it exceeded a bound, says which.
pub(super) fn rendering<T>(input: usize, render: impl FnOnce() -> T) -> (T, Option<String>) {
    METER.with_borrow_mut(|meter| *meter = Meter { input, ..Meter::EMPTY });
    let result = render();
    (result, METER.replace(Meter::EMPTY).exceeded)
}

/// Counts bytes that are made, or are about to be.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    METER.with_borrow_mut(|meter| meter.charge(bytes))
}

/// Refuses a single text, list or dict of so many bytes.
pub(super) fn fits(bytes: usize) -> Result<(), Error> {
    METER.with_borrow_mut(|meter| {
        if bytes <= meter.bound(TEMPLATE_VALUE_BYTES) {
            return Ok(());
        }
        Err(meter.exceed("a single text or list of it would", TEMPLATE_VALUE_BYTES))
    })
}

/// A list of values that were made before.
pub(super) fn listed(items: usize) -> Result<(), Error> {
    charge(items.saturating_mul(ELEMENT))
}

/// An operation reads all of a text.
pub(super) fn read(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) if text.len() >= READ_SHARE => charge(text.len() / READ_SHARE),
        _ => Ok(()),
    }
}

/// An operation compares a value, part by part.
pub(super) fn compared(value: &Value) -> Result<(), Error> {
    charge(shown(value)? / COPY_SHARE)
}

/// An operation writes all of a value as text.
pub(super) fn serialised(value: &Value) -> Result<(), Error> {
    charge(shown(value)? / READ_SHARE)
}

/// An operation takes a part of a text, whose characters it counts, or of a list, of which it reads no item.
pub(super) fn divided(value: &Value) -> Result<(), Error> {
    if value.as_str().is_some() { read(value) } else { listed(value.len().unwrap_or_default()) }
}

/// An operation looks for something in a value; a dict has no need to.
pub(super) fn searched(value: &Value) -> Result<(), Error> {
    if value.kind() == ValueKind::Map { Ok(()) } else { charge(shown(value)? / READ_SHARE) }
}

/// An operation reads a text character by character, as values.
pub(super) fn iterated(value: &Value) -> Result<(), Error> {
    value.as_str().map_or(Ok(()), |text| charge(text.len().saturating_mul(ELEMENT)))
}

/// A value that the template made.
pub(super) fn made(value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        if text.len() < LONG {
            return charge(text.len());
        }
        fits(text.len())?;
        let text = Arc::<str>::try_from(value.clone())?;
        return METER.with_borrow_mut(|meter| meter.hold(&text));
    }
    if value.as_object().is_none() {
        return Ok(());
    }
    let mut weight = ValueWeight::default();
    weight.add(value, 0)?;
    charge(weight.elements * ELEMENT)
}

/// Bytes of a value's text, about.
pub(super) fn shown(value: &Value) -> Result<usize, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.len());
    }
    if value.as_object().is_none() {
        return Ok(0);
    }
    let mut weight = ValueWeight::default();
    weight.add(value, 0)?;
    charge(weight.elements)?;
    Ok(weight.bytes)
}

/// A value that becomes part of another one.
pub(super) fn no_namespace(value: &Value) -> Result<(), Error> {
    if !is_namespace(value) {
        return Ok(());
    }
    METER.with_borrow_mut(|meter| {
        let message = "it puts a namespace into another value, which could hold itself".to_owned();
        Err(refused(&mut meter.exceeded, message))
    })
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// What a value holds, each part as often as it is found: what showing or comparing it would meet.
#[derive(Default)]
struct ValueWeight {
    bytes: usize,
    elements: usize,
}

impl ValueWeight {
    fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > TEMPLATE_DEPTH {
            return METER.with_borrow_mut(|meter| {
                let message = format!("its lists or dicts are nested deeper than {TEMPLATE_DEPTH}");
                Err(refused(&mut meter.exceeded, message))
            });
        }
        if let Some(text) = value.as_str() {
            return self.count(text.len());
        }
        self.count(0)?;
        if depth > 0 {
            no_namespace(value)?;
        }
        match value.kind() {
            ValueKind::Map => {
                let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
                for (key, value) in pairs.into_iter().flatten() {
                    self.add(&key, depth + 1)?;
                    self.add(&value, depth + 1)?;
                }
            }
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.add(&item, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn count(&mut self, bytes: usize) -> Result<(), Error> {
        self.bytes += bytes + ELEMENT;
        self.elements += 1;
        if self.elements.is_multiple_of(64) || bytes > ELEMENT { fits(self.bytes) } else { Ok(()) }
    }
}
