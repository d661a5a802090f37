//! Task families with computed answers: word problems, units, sorting, weekdays.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::conversations::{Turn, pick};

pub(crate) const NAMES: [&str; 40] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jonas", "Kate", "Leo", "Maria",
    "Noah", "Olga", "Paul", "Rosa", "Simon", "Tina", "Victor", "Alma", "Boris", "Celia", "Dario", "Elsa", "Frank",
    "Gina", "Hugo", "Ida", "Jakob", "Lena", "Marco", "Nora", "Oscar", "Petra", "Ralf", "Sofia", "Theo", "Vera",
    "Walter",
];
const THINGS: [&str; 10] =
    ["apples", "books", "coins", "stamps", "marbles", "pencils", "shells", "cookies", "cards", "balloons"];

/// A word problem, answered step by step.
pub(crate) fn arithmetic(rng: &mut ChaCha8Rng) -> Turn {
    let (name, things) = (pick(&NAMES, rng), pick(&THINGS, rng));
    let (a, b) = (rng.random_range(3..=14), rng.random_range(2..=9));
    match rng.random_range(0..4) {
        0 => Turn {
            question: format!("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?"),
            answer: format!(
                "Let us work step by step.\n1. {name} starts with {a} {things}.\n2. {name} buys {b} more, so we add: {a} + {b} = {sum}.\n{name} now has {sum} {things}.",
                sum = a + b
            ),
        },
        1 => {
            let all = a + b;
            Turn {
                question: format!(
                    "{name} has {all} {things} and gives away {b} of them. How many {things} are left for {name}?"
                ),
                answer: format!(
                    "Let us work step by step.\n1. {name} starts with {all} {things}.\n2. {name} gives away {b}, so we subtract: {all} - {b} = {a}.\n{name} has {a} {things} left."
                ),
            }
        }
        2 => {
            let boxes = rng.random_range(2..=9);
            Turn {
                question: format!(
                    "{name} has {boxes} boxes with {b} {things} in each box. How many {things} is that in all?"
                ),
                answer: format!(
                    "Let us work step by step.\n1. There are {boxes} boxes.\n2. Each box holds {b} {things}, so we multiply: {boxes} * {b} = {product}.\n{name} has {product} {things} in all.",
                    product = boxes * b
                ),
            }
        }
        _ => {
            let friends = rng.random_range(2..=9);
            Turn {
                question: format!(
                    "{name} shares {all} {things} equally among {friends} friends. How many {things} does each friend get?",
                    all = friends * b
                ),
                answer: format!(
                    "Let us work step by step.\n1. There are {all} {things} to share.\n2. There are {friends} friends, so we divide: {all} / {friends} = {b}.\nEach friend gets {b} {things}.",
                    all = friends * b
                ),
            }
        }
    }
}

/// A larger unit (singular and plural), a smaller one, and the factor between them.
const UNITS: [(&str, &str, &str, u32); 12] = [
    ("kilometre", "kilometres", "metres", 1000),
    ("metre", "metres", "centimetres", 100),
    ("kilogram", "kilograms", "grams", 1000),
    ("litre", "litres", "millilitres", 1000),
    ("hour", "hours", "minutes", 60),
    ("minute", "minutes", "seconds", 60),
    ("day", "days", "hours", 24),
    ("week", "weeks", "days", 7),
    ("year", "years", "months", 12),
    ("foot", "feet", "inches", 12),
    ("yard", "yards", "feet", 3),
    ("euro", "euros", "cents", 100),
];

/// A conversion between two units.
pub(crate) fn units(rng: &mut ChaCha8Rng) -> Turn {
    let (one, many, small, factor) = pick(&UNITS, rng);
    let count = rng.random_range(2..=12);
    let question = match rng.random_range(0..3) {
        0 => format!("How many {small} are {count} {many}?"),
        1 => format!("Please convert {count} {many} to {small}."),
        _ => format!("I have {count} {many}. What is that in {small}?"),
    };
    let total = count * factor;
    let answer = format!(
        "To go from {many} to {small}, multiply by {factor}, because one {one} has {factor} {small}.\nSo {count} {many} are {count} * {factor} = {total} {small}.\nThe answer is {total} {small}."
    );
    Turn { question, answer }
}

/// Sorting a short list of numbers.
pub(crate) fn sorting(rng: &mut ChaCha8Rng) -> Turn {
    let length = rng.random_range(3..=4);
    let mut numbers: Vec<u32> = Vec::new();
    while numbers.len() < length {
        let number = rng.random_range(1..=25);
        if !numbers.contains(&number) {
            numbers.push(number);
        }
    }
    let given = join(&numbers);
    let ascending: bool = rng.random();
    numbers.sort_unstable();
    let (smallest, largest) = (numbers[0], numbers[length - 1]);
    if !ascending {
        numbers.reverse();
    }
    let order = if ascending { "from smallest to largest" } else { "from largest to smallest" };
    Turn {
        question: format!("Sort these numbers {order}: {given}."),
        answer: format!(
            "Here are the {length} numbers sorted {order}:\n{sorted}\nThe smallest number in the list is {smallest} and the largest number in the list is {largest}.",
            sorted = join(&numbers)
        ),
    }
}

fn join(numbers: &[u32]) -> String {
    numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The weekday some days later or earlier.
pub(crate) fn calendar(rng: &mut ChaCha8Rng) -> Turn {
    let today = rng.random_range(0..7);
    let days = rng.random_range(8..=34);
    let (weeks, rest) = (days / 7, days % 7);
    let name = WEEKDAYS[today];
    let forward: bool = rng.random();
    let question = match (forward, rng.random_range(0..2)) {
        (true, 0) => format!("Today is {name}. What day of the week will it be in {days} days?"),
        (true, _) => format!("If today is {name}, which day comes {days} days later?"),
        (false, 0) => format!("Today is {name}. What day of the week was it {days} days ago?"),
        (false, _) => format!("If today is {name}, which day was {days} days earlier?"),
    };
    let counted: Vec<&str> =
        (1..=rest).map(|step| WEEKDAYS[if forward { today + step } else { today + 7 - step } % 7]).collect();
    let result = counted.last().copied().unwrap_or(name);
    let direction = if forward { "forward" } else { "back" };
    let steps = match counted.len() {
        0 => format!("Nothing is left to count, so we stay at {name}."),
        _ => format!("Count {rest} {direction} from {name}: {}.", counted.join(", ")),
    };
    let verb = if forward { "will be" } else { "was" };
    Turn {
        question,
        answer: format!(
            "A week has 7 days, and whole weeks do not change the day of the week.\n{days} days are {weeks} * 7 + {rest}, so {rest} days are left.\n{steps}\nIt {verb} {result}."
        ),
    }
}
