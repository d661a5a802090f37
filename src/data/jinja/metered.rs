//! A compiled template whose instructions are metered: around each one that makes a value, or reads a long text, stands a filter of ours that
//! counts it ([`meter`]). minijinja itself bounds the number of its steps only.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

use minijinja::machinery::{self, CompiledTemplate, Instruction, Instructions, TemplateConfig};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};
use self_cell::self_cell;

use super::{limits, meter};
use crate::panics;

/// The template's name in errors.
const TEMPLATE: &str = "chat_template";

/// Names of our filters: no template can write them.
const MADE: &str = "\0made";
const FLAT: &str = "\0flat";
const SLICED: &str = "\0sliced";
const READ: &str = "\0read";
const READ_FIRST: &str = "\0read_first";
const SLICE_OF: &str = "\0slice_of";
const COMPARED: &str = "\0compared";
const COMPARED_ARGUMENT: &str = "\0compared_argument";
const SEARCHED: &str = "\0searched";
const LOOPED: &str = "\0looped";
const ITERATED: &str = "\0iterated";
const CHARGE: &str = "\0charge";
const CONCAT: &str = "\0concat";
const REPEATED: &str = "\0repeated";
const NO_NAMESPACE: &str = "\0no_namespace";
const RANGE: &str = "\0range";

const OURS: [&str; 16] = [
    MADE,
    FLAT,
    SLICED,
    READ,
    READ_FIRST,
    SLICE_OF,
    COMPARED,
    COMPARED_ARGUMENT,
    SEARCHED,
    LOOPED,
    ITERATED,
    CHARGE,
    CONCAT,
    REPEATED,
    NO_NAMESPACE,
    RANGE,
];

/// Raw text below this costs less than the steps around it.
const SHORT_TEXT: usize = 64;

/// Bytes of a macro's variables.
const OF_MACRO: usize = 1024;

/// A level of the parser or of the compiler takes some kilobytes, in a debug build.
const COMPILER_STACK: usize = 64 << 20;

/// Places in minijinja's table of filters that are found already; a template's own filters take them from the first one on.
const PLACES: u8 = 50;

/// A filter without a place is looked up by its name.
const BY_NAME: u8 = !0;

/// Filters and tests that read at most the beginning of a text, or count what they read themselves ([`limits`]).
const CHEAP: [&str; 23] = [
    "trim",
    "select",
    "selectattr",
    "reject",
    "rejectattr",
    "default",
    "d",
    "items",
    "attr",
    "tojson",
    "join",
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "boolean",
    "number",
    "integer",
    "true",
    "false",
];

/// Filters that make a list of a text's characters.
const BY_CHARACTER: [&str; 10] = ["list", "sort", "unique", "batch", "slice", "groupby", "map", "sum", "min", "max"];

self_cell!(
    struct TemplateWithSource {
        owner: String,
        #[covariant]
        dependent: CompiledTemplate,
    }
);

/// A template and the environment that it is rendered in.
pub(in crate::data) struct Metered {
    environment: Environment<'static>,
    template: TemplateWithSource,
}

impl std::fmt::Debug for Metered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metered").finish_non_exhaustive()
    }
}

impl Metered {
    /// `source` is compiled on a thread with a stack for the deepest template that passed [`super::shape`].
    pub(super) fn new(
        mut environment: Environment<'static>,
        source: String,
        syntax: &SyntaxConfig,
    ) -> Result<Self, Error> {
        add_filters(&mut environment);
        let compile = || of_library(|| TemplateWithSource::try_new(source, |source| compiled(source, syntax)));
        let template = thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| failed(&format!("no thread to compile it: {error}")))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        Ok(Self { environment, template })
    }

    /// What the template renders of a conversation of `input` bytes; and which bound it exceeded.
    pub(in crate::data) fn render(&self, context: Value, input: usize) -> (Result<String, Error>, Option<String>) {
        let template = self.template.borrow_dependent();
        let render = || {
            let mut text = String::with_capacity(template.buffer_size_hint.min(1 << 16));
            let mut out = machinery::make_string_output(&mut text);
            let (environment, blocks) = (&self.environment, &template.blocks);
            machinery::eval(environment, &template.instructions, context, blocks, &mut out, AutoEscape::None)?;
            Ok(text)
        };
        meter::rendering(input, || of_library(render))
    }
}

/// Runs minijinja on a user's template; a panic in it becomes an error.
pub(super) fn of_library<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    panics::of_library(work).unwrap_or_else(|panic| Err(Error::new(ErrorKind::InvalidOperation, panic)))
}

fn failed(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

fn compiled<'s>(source: &'s str, syntax: &SyntaxConfig) -> Result<CompiledTemplate<'s>, Error> {
    let no_escapes = Arc::new(|_: &str| AutoEscape::None);
    let config = TemplateConfig { syntax_config: syntax.clone(), default_auto_escape: no_escapes };
    let mut template = CompiledTemplate::new(TEMPLATE, source, &config)?;
    template.instructions = metered(&template.instructions)?;
    for block in template.blocks.values_mut() {
        *block = metered(block)?;
    }
    Ok(template)
}

fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter(MADE, |value: Value| meter::made(&value).map(|()| value));
    environment.add_filter(FLAT, flat);
    environment.add_filter(SLICED, sliced);
    environment.add_filter(READ, |value: Value| meter::read(&value).map(|()| value));
    environment.add_filter(COMPARED, |value: Value| meter::compared(&value).map(|()| value));
    environment.add_filter(COMPARED_ARGUMENT, |value: ValueOrKwargs| {
        meter::compared(&value)?;
        Ok::<_, Error>(value.into_value())
    });
    environment.add_filter(SEARCHED, |value: Value| meter::searched(&value).map(|()| value));
    environment.add_filter(LOOPED, |value: Value| meter::iterated(&value).map(|()| value));
    environment.add_filter(ITERATED, |value: Value| {
        meter::iterated(&value)?;
        meter::searched(&value).map(|()| value)
    });
    environment.add_filter(CHARGE, |bytes: usize| meter::charge(bytes).map(|()| Value::UNDEFINED));
    environment.add_filter(NO_NAMESPACE, |value: Value| meter::no_namespace(&value).map(|()| value));
    // What is named range may be another function: a template can set the name.
    environment.add_filter(RANGE, |value: Value| {
        if value.kind() != ValueKind::Iterable {
            meter::made(&value)?;
        }
        Ok::<_, Error>(value)
    });
    environment.add_filter(READ_FIRST, |values: Rest<ValueOrKwargs>| {
        let values = values.into_values();
        values.first().map_or(Ok(()), meter::searched)?;
        values.iter().skip(1).try_for_each(meter::compared)?;
        Ok::<_, Error>(unpackable(values))
    });
    environment.add_filter(SLICE_OF, |values: Rest<ValueOrKwargs>| {
        let values = values.into_values();
        values.first().map_or(Ok(()), meter::divided)?;
        Ok::<_, Error>(unpackable(values))
    });
    environment.add_filter(REPEATED, |left: Value, right: Value| {
        limits::repeated(&left, &right)?;
        Ok::<_, Error>(unpackable(vec![left, right]))
    });
    environment.add_filter(CONCAT, concatenated);
    environment.set_formatter(emit);
}

/// Values that `UnpackList` puts onto the stack again.
fn unpackable(values: Vec<Value>) -> Value {
    Value::from(Tuple::from(values.into_iter().rev().collect::<Vec<_>>()))
}

/// A value that the template made; one that would compute its items anew whenever they are read becomes a list, as it is in Python.
fn flat(value: Value) -> Result<Value, Error> {
    meter::made(&value)?;
    Ok(if value.kind() == ValueKind::Iterable { value.try_iter()?.collect() } else { value })
}

/// As [`flat`], where the items are those of a list that was counted.
fn sliced(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return meter::made(&value).map(|()| value);
    }
    meter::listed(value.len().unwrap_or_default())?;
    Ok(value.try_iter()?.collect())
}

/// `left ~ right`.
fn concatenated(left: Value, right: Value) -> Result<Value, Error> {
    meter::fits(meter::shown(&left)?.saturating_add(meter::shown(&right)?))?;
    let text = match (left.as_str(), right.as_str()) {
        (Some(left), Some(right)) => Value::from([left, right].concat()),
        _ => Value::from(format!("{left}{right}")),
    };
    meter::made(&text).map(|()| text)
}

/// `{{ value }}`.
fn emit(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let escaped = if matches!(state.auto_escape(), AutoEscape::None) { 1 } else { 6 };
    meter::charge(meter::shown(value)?.saturating_mul(escaped))?;
    minijinja::escape_formatter(out, state, value)
}

/// The same instructions, and ours around them.
fn metered<'s>(plain: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    let all: Vec<&Instruction<'s>> = (0..).map_while(|at| plain.get(at)).collect();
    let targets: BTreeSet<u32> = all.iter().filter_map(|instruction| target(instruction)).collect();
    let (mut groups, mut starts, mut length) = (Vec::with_capacity(all.len()), Vec::with_capacity(all.len() + 1), 0u32);
    for (at, instruction) in all.iter().enumerate() {
        let before = at.checked_sub(1).map(|before| all[before]).filter(|_| !targets.contains(&place(at)));
        let group = group(instruction, before, all.get(at + 1).copied())?;
        starts.push(length);
        length += place(group.len());
        groups.push(group);
    }
    starts.push(length);
    let taken = all.iter().filter_map(|instruction| match instruction {
        Instruction::ApplyFilter(_, _, place) if *place != BY_NAME => Some(*place + 1),
        _ => None,
    });
    let places: Vec<u8> = (taken.max().unwrap_or_default()..PLACES).collect();
    let mut metered = Instructions::new(plain.name(), plain.source());
    for (at, mut instruction) in
        groups.into_iter().enumerate().flat_map(|(at, group)| group.into_iter().map(move |one| (at, one)))
    {
        if let Some(target) = target_mut(&mut instruction) {
            *target = starts[*target as usize];
        }
        if let Instruction::ApplyFilter(name, _, place) = &mut instruction {
            *place = OURS
                .iter()
                .position(|ours| ours == name)
                .map_or(*place, |at| places.get(at).copied().unwrap_or(BY_NAME));
        }
        match plain.get_line(place(at)).and_then(|line| u16::try_from(line).ok()) {
            Some(line) => metered.add_with_line(instruction, line),
            None => metered.add(instruction),
        };
    }
    Ok(metered)
}

fn place(at: usize) -> u32 {
    u32::try_from(at).expect("a template of 1 MiB has fewer instructions")
}

fn target(instruction: &Instruction) -> Option<u32> {
    target_mut(&mut instruction.clone()).copied()
}

fn target_mut<'i>(instruction: &'i mut Instruction) -> Option<&'i mut u32> {
    match instruction {
        Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// One instruction with ours. `before` is known to run before it; `next` is the one behind it.
fn group<'s>(
    instruction: &Instruction<'s>,
    before: Option<&Instruction<'s>>,
    next: Option<&Instruction<'s>>,
) -> Result<Vec<Instruction<'s>>, Error> {
    use Instruction as I;
    let one = instruction.clone();
    let is_shown = matches!(next, Some(I::Emit)); // what it makes is counted there, and then gone
    let with_constant = matches!(before, Some(I::LoadConst(_)));
    let near = matches!(before, Some(I::LoadConst(key)) if key.as_str().is_some() || key.as_usize().is_some_and(|at| at < SHORT_TEXT));
    let of_top = |name| I::ApplyFilter(name, Some(1), BY_NAME);
    let behind = |name, one| if is_shown { vec![one] } else { vec![one, of_top(name)] };
    Ok(match instruction {
        I::Add => behind(FLAT, one),
        I::StringConcat => vec![I::ApplyFilter(CONCAT, Some(2), BY_NAME)],
        I::Mul => vec![I::ApplyFilter(REPEATED, Some(2), BY_NAME), I::UnpackList(2), one, of_top(FLAT)],
        I::Slice => vec![I::ApplyFilter(SLICE_OF, Some(4), BY_NAME), I::UnpackList(4), one, of_top(SLICED)],
        I::BuildList(Some(0)) | I::BuildMap(0) => vec![one],
        I::BuildList(_) | I::BuildMap(_) | I::BuildTuple(_) => vec![one, of_top(MADE)],
        I::CallFunction("range", _) => vec![one, of_top(RANGE)],
        I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) => behind(MADE, one),
        I::EndCapture => vec![one, of_top(MADE)],
        I::SetAttr(_) => vec![I::Swap, of_top(NO_NAMESPACE), I::Swap, one],
        I::GetItem if near => vec![one],
        I::GetItem => vec![of_top(READ), I::Swap, of_top(READ), I::Swap, one],
        I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte | I::In if with_constant => vec![one],
        I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte | I::CompareAndPreserve(_) => vec![of_top(COMPARED), one],
        I::In => vec![of_top(SEARCHED), I::Swap, of_top(READ), I::Swap, one],
        I::PushLoop(_) => vec![of_top(LOOPED), one],
        I::EmitRaw(text) if text.len() >= SHORT_TEXT => charged(text.len(), Some(one), None),
        I::BuildMacro(..) => charged(OF_MACRO, None, Some(one)),
        I::ApplyFilter(name, arguments, _) => {
            let mut group = reading(name, *arguments)?;
            group.extend(behind(FLAT, one));
            group
        }
        I::PerformTest(name, arguments, _) => {
            let mut group = reading(name, *arguments)?;
            group.push(one);
            group
        }
        _ => vec![one],
    })
}

fn charged<'s>(bytes: usize, behind: Option<Instruction<'s>>, before: Option<Instruction<'s>>) -> Vec<Instruction<'s>> {
    use Instruction as I;
    let charge = [I::LoadConst(Value::from(bytes)), I::ApplyFilter(CHARGE, Some(1), BY_NAME), I::DiscardTop];
    before.into_iter().chain(charge).chain(behind).collect()
}

/// What stands before a filter or test of so many arguments.
fn reading<'s>(name: &str, arguments: Option<u16>) -> Result<Vec<Instruction<'s>>, Error> {
    use Instruction as I;
    let reads = if BY_CHARACTER.contains(&name) { ITERATED } else { READ };
    Ok(match arguments {
        _ if CHEAP.contains(&name) => vec![],
        None => return Err(failed(&format!("{name}: a filter or test takes its arguments one by one, without *"))),
        Some(0) => vec![],
        Some(1) => vec![I::ApplyFilter(reads, Some(1), BY_NAME)],
        Some(2) => {
            let of_top = |name| I::ApplyFilter(name, Some(1), BY_NAME);
            vec![of_top(COMPARED_ARGUMENT), I::Swap, of_top(reads), I::Swap]
        }
        Some(count) => {
            vec![I::ApplyFilter(READ_FIRST, Some(count), BY_NAME), I::UnpackList(count.into())]
        }
    })
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    use super::*;

    /// Each with every kind of instruction that is metered somewhere.
    const TEMPLATES: [&str; 33] = [
        "{{ 'a' + 'b' }}{% set x = 'a' + 'b' %}{{ x + x ~ 1 ~ none ~ [1, 'b'] }}",
        "{% set x = [1, 2] + l %}{{ x }}{{ ([1] + l) | length }}{{ ([3] + [1, 2] + l) | sort | join(', ') }}",
        "{{ 'ab' * 3 }}{{ 3 * 'ab' }}{{ l * 2 }}{{ 2 * 3 * n }}{{ (1, 2) * 2 }}",
        "{{ s[1:] }}{{ s[:-1] }}{{ s[::-1] }}{{ l[1:] }}{{ l[::-1] }}{{ l[1:] | length }}{{ (l[0:])[0] }}{{ l[1:][0] is undefined }}",
        "{% for a in l[1:] %}{{ loop.index }}{{ a }}{% else %}none{% endfor %}",
        "{{ l[0] }}{{ l[-1] }}{{ s[0] }}{{ s[-1] }}{{ d['k'] }}{{ d.k }}{{ d[s] }}{{ l[n - 2] }}{{ d['x'] }}",
        "{{ 1 == n }}{{ n == 1 }}{{ 'a' == s[0] }}{{ s == s }}{{ l == l }}{{ n != (1 if s else 2) }}{{ 1 < n < 9 < 8 }}",
        "{{ n == (s if n > 5 else 'x') }}{{ (s if n == 2 else 'x') == 'x' }}{{ 'b' in s }}{{ 'k' in d }}{{ 1 in l }}{{ 1 not in l }}",
        "{{ s in ['abc', 'x'] }}{{ s | upper }}{{ s | replace('b', 'xy') }}{{ s | default('z') }}{{ u | default('z', true) }}",
        "{{ l | join('-') }}{{ l | map('string') | join }}{{ l | map('string') | map('replace', '1', 'one') | list }}",
        "{{ m | map(attribute='role') | join(',') }}{{ m | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ m | rejectattr('role', 'in', ['user']) | map(attribute='content') | list }}{{ l | select('odd') | list }}{{ l | reject('odd') | list }}",
        "{{ s | trim }}{{ s | trim('c') }}{{ ' x '.strip() }}{{ s.split('b') }}{{ s.replace('a', 'b').upper() }}{{ '-'.join(l) }}",
        "{{ 'x{}y{:>4}'.format(s, n) }}{{ '%s %4d' | format(s, n) }}{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent(width=2, first=true) }}",
        "{{ d | items | list }}{{ d.items() | list }}{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}{{ d | dictsort }}{{ d | length }}",
        "{{ l is sequence }}{{ s is string }}{{ n is divisibleby 2 }}{{ n is eq(2) }}{{ s is startingwith('a') }}{{ u is defined }}{{ s is in(['abc']) }}",
        "{% set ns = namespace(a=1, t='') %}{% for x in l %}{% set ns.a = ns.a + x %}{% set ns.t = ns.t ~ x %}{% endfor %}{{ ns.a }}{{ ns.t }}",
        "{% macro f(a, b='x', c=none) %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ f(1) }}{{ f(1, c=2) }}{% set y = f(s, 'z') %}{{ y | upper }}",
        "{% macro g(n) %}{{ n }}{% if n > 0 %}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(3) }}",
        "{% macro w() %}[{{ caller('x') }}]{% endmacro %}{% call(v) w() %}{{ v }}{{ s }}{% endcall %}",
        "{% set t %}a{{ s }}{% for x in l %}{{ x }}{% endfor %}{% endset %}{{ t | length }}{{ t }}",
        "{% filter upper %}a{{ s }}{% endfilter %}{% with a = 1, b = s %}{{ a }}{{ b }}{% endwith %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}",
        "{% for x in [[1], [2, [3]]] recursive %}{% if x is sequence %}{% set i = loop(x) %}({{ i }}){% else %}{{ x }}{% endif %}{% endfor %}",
        "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}{% for c in s %}{{ c }}.{% endfor %}",
        "{% for x in m if x.role == 'user' and x.content %}{{ loop.first }}{{ loop.last }}{{ x['content'] }}{% endfor %}",
        "{{ [1, (2, 3), {'a': [n]}] }}{{ dict(a=1, b=s) }}{{ {'a': 1}.get('b', 'c') }}{{ (n, s) }}{{ [] }}{{ {} }}",
        "{{ range(3) | list }}{% for i in range(2, 6, 2) %}{{ i }}{% endfor %}{{ n ** 3 }}{{ -n }}{{ 7 // n }}{{ 7 % n }}{{ not n }}",
        "{% if s and (not u or n) %}{{ s or 'x' }}{{ u or 'x' }}{{ s and n }}{% elif n %}y{% else %}z{% endif %}",
        "this is raw text of more than sixty-four bytes, which is counted before it is written {{ s }} {% raw %}{{ x }}{% endraw %}{# c #}",
        "{% autoescape true %}{{ '<' ~ s }}{% endautoescape %}{{ '<' | escape }}{{ l | batch(2) | list }}{{ l | slice(2) | list }}",
        "{{ m | groupby('role') | list | length }}{{ l | first }}{{ l | last }}{{ l | sum }}{{ l | unique | list }}{{ l | min }}{{ s | reverse }}",
        "{% set a, b = [1, s] %}{{ a }}{{ b }}{% set f = 'x' if n else 'y' %}{{ f }}{{ l | reverse | list }}{{ [l, l] | sum(start=[]) }}",
    ];

    /// What is not metered: minijinja's own way from source to text.
    fn plain(source: &str, syntax: &SyntaxConfig, context: &Value) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(syntax.clone());
        limits::add(&mut environment);
        environment.add_template_owned(TEMPLATE, source.to_owned())?;
        environment.get_template(TEMPLATE)?.render(context)
    }

    #[test]
    fn a_metered_template_renders_as_a_plain_one() {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap();
        let messages = [context! { role => "user", content => "a" }, context! { role => "tool", content => "b" }];
        let context =
            context! { s => "abc", n => 2, l => [3, 1, 2], d => context! { k => "v", abc => 1 }, m => messages };
        let mut refused = vec![];
        for source in TEMPLATES {
            let mut environment = Environment::new();
            limits::add(&mut environment);
            let metered = Metered::new(environment, source.to_owned(), &syntax).unwrap();
            let (ours, exceeded) = metered.render(context.clone(), 0);
            let plain = plain(source, &syntax, &context);
            assert_eq!(exceeded, None, "{source}");
            assert_eq!(ours.as_ref().ok(), plain.as_ref().ok(), "{source}: {ours:?} {plain:?}");
            refused.extend(plain.err().map(|error| format!("{source}: {error:#}")));
        }
        assert!(refused.is_empty(), "every one is to render: {refused:#?}");
    }

    #[test]
    fn a_part_of_the_messages_costs_as_much_as_its_list() {
        let messages: Vec<Value> = (0..500).map(|_| context! { role => "user", content => "a".repeat(4096) }).collect();
        let source = "{% for m in messages %}{% set rest = messages[loop.index:] %}{{ rest | length }} {% endfor %}";
        let metered = Metered::new(Environment::new(), source.to_owned(), &SyntaxConfig::default()).unwrap();
        let (text, exceeded) = metered.render(context! { messages => messages }, 500 * 4096);
        assert_eq!((text.unwrap().split_whitespace().count(), exceeded), (500, None));
    }

    #[test]
    fn an_error_keeps_its_line() {
        let metered =
            Metered::new(Environment::new(), "a\n\n{{ [1] + 1 }}".to_owned(), &SyntaxConfig::default()).unwrap();
        assert_eq!(metered.render(Value::UNDEFINED, 0).0.unwrap_err().line(), Some(3));
    }
}
