//! Task families that need a memorized table: functions in Python, how-tos, a shop's questions.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::conversations::{Turn, pick};

const FUNCTION_NAMES: [&str; 12] = [
    "solve",
    "compute",
    "process",
    "run_task",
    "get_result",
    "evaluate",
    "my_function",
    "helper",
    "apply_rule",
    "transform",
    "calculate",
    "work",
];
const ARGUMENTS: [&str; 8] = ["items", "values", "numbers", "data", "entries", "points", "scores", "prices"];

/// The function's purpose, its start value, its loop's body, and a description.
const LOOPS: [(&str, &str, &str, &str); 8] = [
    ("adds up all", "total = 0", "total += item", "adds every item to the total"),
    ("multiplies all", "total = 1", "total *= item", "multiplies the total by every item"),
    ("counts all", "total = 0", "total += 1", "counts one for every item"),
    ("adds the squares of all", "total = 0", "total += item * item", "adds the square of every item"),
    (
        "counts the even ones of all",
        "total = 0",
        "if item % 2 == 0:\n            total += 1",
        "counts only the items that two divides",
    ),
    (
        "counts the negative ones of all",
        "total = 0",
        "if item < 0:\n            total += 1",
        "counts only the items below zero",
    ),
    (
        "finds the largest of all",
        "total = None",
        "if total is None or item > total:\n            total = item",
        "keeps the largest item that it has seen",
    ),
    (
        "finds the smallest of all",
        "total = None",
        "if total is None or item < total:\n            total = item",
        "keeps the smallest item that it has seen",
    ),
];

/// A Python function over a list.
pub(crate) fn code(rng: &mut ChaCha8Rng) -> Turn {
    let (name, argument) = (pick(&FUNCTION_NAMES, rng), pick(&ARGUMENTS, rng));
    let (task, start, body, words) = pick(&LOOPS, rng);
    let question = match rng.random_range(0..2) {
        0 => format!("Write a Python function {name} that {task} {argument} in a list."),
        _ => format!("I need a Python function called {name}. It {task} {argument} in a list."),
    };
    let answer = format!(
        "```python\ndef {name}({argument}):\n    {start}\n    for item in {argument}:\n        {body}\n    return total\n```\nThe function {name} goes through {argument} once and {words}."
    );
    Turn { question, answer }
}

/// Amount per person, with unit and name.
type Ingredient = (u32, &'static str);

/// A dish, its ingredients and its steps.
const DISHES: [(&str, [Ingredient; 3], [&str; 4]); 8] = [
    (
        "pancakes",
        [(100, "grams of flour"), (150, "millilitres of milk"), (1, "eggs")],
        [
            "Whisk the eggs with the milk.",
            "Stir in the flour until the batter is smooth.",
            "Heat some butter in a pan.",
            "Bake thin pancakes on both sides until they are golden.",
        ],
    ),
    (
        "tomato soup",
        [(250, "grams of tomatoes"), (200, "millilitres of water"), (1, "onions")],
        [
            "Chop the onions and fry them in oil.",
            "Add the tomatoes and the water.",
            "Let everything simmer for 20 minutes.",
            "Blend the soup and season it with salt and basil.",
        ],
    ),
    (
        "rice pudding",
        [(60, "grams of rice"), (250, "millilitres of milk"), (2, "spoons of sugar")],
        [
            "Bring the milk to the boil with the sugar.",
            "Add the rice and turn down the heat.",
            "Stir every few minutes for half an hour.",
            "Serve the pudding warm with cinnamon.",
        ],
    ),
    (
        "vegetable curry",
        [(200, "grams of vegetables"), (100, "millilitres of coconut milk"), (80, "grams of rice")],
        [
            "Cook the rice in salted water.",
            "Fry the vegetables with curry powder.",
            "Add the coconut milk and simmer for 10 minutes.",
            "Serve the curry on the rice.",
        ],
    ),
    (
        "fruit salad",
        [(1, "apples"), (1, "oranges"), (2, "spoons of yoghurt")],
        [
            "Wash and peel the fruit.",
            "Cut everything into small pieces.",
            "Mix the pieces in a large bowl.",
            "Put the yoghurt on top and serve it cold.",
        ],
    ),
    (
        "omelette",
        [(3, "eggs"), (20, "grams of cheese"), (1, "spoons of butter")],
        [
            "Beat the eggs with salt and pepper.",
            "Melt the butter in a hot pan.",
            "Pour in the eggs and let them set.",
            "Add the cheese, fold the omelette and serve it at once.",
        ],
    ),
    (
        "noodles with pesto",
        [(120, "grams of noodles"), (2, "spoons of pesto"), (10, "grams of cheese")],
        [
            "Boil the noodles in salted water for 9 minutes.",
            "Keep a cup of the water and drain the rest.",
            "Stir the pesto and a little water into the noodles.",
            "Grate the cheese over the noodles and serve them.",
        ],
    ),
    (
        "potato gratin",
        [(250, "grams of potatoes"), (100, "millilitres of cream"), (30, "grams of cheese")],
        [
            "Peel the potatoes and cut them into thin slices.",
            "Lay the slices into a buttered dish.",
            "Pour the cream over them and add the cheese.",
            "Bake the gratin for 45 minutes until it is brown.",
        ],
    ),
];

/// A recipe for some number of people.
pub(crate) fn howto(rng: &mut ChaCha8Rng) -> Turn {
    let (dish, ingredients, steps) = pick(&DISHES, rng);
    let people = rng.random_range(2..=9);
    let question = match rng.random_range(0..4) {
        0 => format!("How do I make {dish} for {people} people?"),
        1 => format!("Give me a recipe of {dish} for {people} people."),
        2 => format!("{people} guests are coming. How can I cook {dish} for them?"),
        _ => format!("What do I need for {dish} for {people} people, and what do I do?"),
    };
    let list: Vec<String> = ingredients.iter().map(|(amount, what)| format!("- {} {what}", amount * people)).collect();
    let numbered: Vec<String> = steps.iter().enumerate().map(|(at, step)| format!("{}. {step}", at + 1)).collect();
    Turn {
        question,
        answer: format!(
            "For {dish} for {people} people you need:\n{}\nThis is how it goes:\n{}",
            list.join("\n"),
            numbered.join("\n")
        ),
    }
}

/// A product of a fictitious shop: name, price, months of warranty, hours of battery, cleaning agent.
const PRODUCTS: [(&str, u32, u32, u32, &str); 10] = [
    ("Lumo Lamp", 49, 24, 12, "a dry cloth"),
    ("Aero Kettle", 65, 36, 2, "warm water and vinegar"),
    ("Nimbus Speaker", 89, 24, 18, "a soft brush"),
    ("Terra Watch", 129, 12, 72, "a damp cloth"),
    ("Pico Camera", 199, 24, 6, "a lens cloth"),
    ("Solis Charger", 35, 12, 20, "a dry cloth"),
    ("Vento Fan", 59, 36, 10, "a soft brush"),
    ("Orbit Vacuum", 249, 48, 3, "warm water and soap"),
    ("Echo Piano", 399, 60, 8, "a damp cloth"),
    ("Frost Box", 159, 36, 30, "warm water and soap"),
];

/// A question, and the answer's last sentences; `{p}` product, `{c}` price, `{w}` warranty, `{b}` battery, `{k}`
/// cleaning.
const QUESTIONS: [(&str, &str); 6] = [
    ("How much is the {p}?", "The {p} costs {c} euros. Delivery is free, and it takes three working days."),
    (
        "How long is the warranty of the {p}?",
        "The warranty of the {p} is {w} months from the day of purchase. Please keep the receipt, because you need it for a repair.",
    ),
    (
        "How long does the battery of the {p} last?",
        "The battery of the {p} lasts for {b} hours. To make it last longer, charge it before it is quite empty.",
    ),
    (
        "How do I clean the {p}?",
        "First switch the {p} off and take out the plug. Then clean it with {k}, and let it dry before you use it again.",
    ),
    (
        "Can I send the {p} back?",
        "Yes, you can send the {p} back within 30 days. Use the box that it came in, and you will get the {c} euros back within one week.",
    ),
    (
        "My {p} does not start. What can I do?",
        "First check the plug and the cable. Then hold the power button of the {p} for ten seconds. If it still does not start, the warranty of {w} months covers the repair.",
    ),
];
const GREETINGS: [&str; 6] = ["", "Hello! ", "Hi there. ", "Good morning! ", "Excuse me. ", "I have a question. "];

/// A customer's question.
pub(crate) fn faq(rng: &mut ChaCha8Rng) -> Turn {
    let (product, price, warranty, battery, cleaning) = pick(&PRODUCTS, rng);
    let (question, answer) = pick(&QUESTIONS, rng);
    let greeting = pick(&GREETINGS, rng);
    let answer = answer
        .replace("{p}", product)
        .replace("{c}", &price.to_string())
        .replace("{w}", &warranty.to_string())
        .replace("{b}", &battery.to_string())
        .replace("{k}", cleaning);
    Turn {
        question: format!("{greeting}{}", question.replace("{p}", product)),
        answer: format!("Thank you for your question about the {product}. {answer} Is there anything else?"),
    }
}
