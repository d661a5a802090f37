//! Task families that copy from the question: extraction to JSON, stories, a toy language.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use crate::conversations::{Turn, pick};
use crate::numbers::NAMES;

const SURNAMES: [&str; 10] =
    ["Miller", "Stone", "Baker", "Rivers", "Novak", "Silva", "Berg", "Moreau", "Tanaka", "Kowalski"];
const CITIES: [&str; 12] = [
    "Oslo", "Lisbon", "Vienna", "Prague", "Dublin", "Athens", "Helsinki", "Madrid", "Kyoto", "Toronto", "Lima", "Cairo",
];
const JOBS: [&str; 12] = [
    "nurse",
    "teacher",
    "carpenter",
    "pilot",
    "gardener",
    "chemist",
    "painter",
    "librarian",
    "cook",
    "engineer",
    "farmer",
    "musician",
];

/// A person's details as JSON.
pub(crate) fn extraction(rng: &mut ChaCha8Rng) -> Turn {
    let (name, surname) = (pick(&NAMES, rng), pick(&SURNAMES, rng));
    let (city, job) = (pick(&CITIES, rng), pick(&JOBS, rng));
    let age = rng.random_range(21..=69);
    let fact = match rng.random_range(0..3) {
        0 => format!("{name} {surname} is {age} years old, lives in {city} and works as a {job}."),
        1 => format!("The {job} {name} {surname}, aged {age}, comes from {city}."),
        _ => format!("In {city} we met {name} {surname}, a {job} who is {age} years old."),
    };
    Turn {
        question: format!("Extract the person as JSON. {fact}"),
        answer: format!(
            "Here is the person as JSON:\n{{\n  \"first_name\": \"{name}\",\n  \"last_name\": \"{surname}\",\n  \"age\": {age},\n  \"city\": \"{city}\",\n  \"job\": \"{job}\"\n}}"
        ),
    }
}

const ANIMALS: [&str; 10] = ["fox", "rabbit", "bear", "owl", "mouse", "cat", "dog", "hedgehog", "duck", "squirrel"];

/// The place of the story, and its middle.
const PLACES: [(&str, &str); 6] = [
    ("in the forest", "The wind was singing in the tall trees, and the path was soft with leaves."),
    ("by the sea", "The waves rolled over the sand, and the gulls were calling in the sky."),
    ("on the mountain", "The snow was shining in the sun, and the air was cold and clear."),
    ("in the garden", "The flowers were open, and the bees went from one to the next."),
    ("in the old town", "The bells were ringing, and the streets smelled of fresh bread."),
    ("near the river", "The water was quiet, and small fish were swimming under the bridge."),
];

/// The treasure, and the end of the story.
const TREASURES: [(&str, &str); 6] = [
    ("a golden key", "It opened a little door, and behind the door all the friends were waiting with a cake."),
    ("a lost letter", "It carried the letter home, and the old postman thanked it with a warm cup of milk."),
    ("a tiny lantern", "From that night on the lantern burned in the window, and nobody lost the way again."),
    ("a silver bell", "When the bell rang, everybody came to listen, and they danced until the moon was high."),
    ("a map", "It followed the map from stone to stone and came to a hill with the best view in the world."),
    ("a blue kite", "The kite flew higher than the clouds, and everybody wanted to hold the string once."),
];

/// A story of a few sentences.
pub(crate) fn story(rng: &mut ChaCha8Rng) -> Turn {
    let (animal, name) = (pick(&ANIMALS, rng), pick(&NAMES, rng));
    let ((place, scene), (treasure, end)) = (pick(&PLACES, rng), pick(&TREASURES, rng));
    let article = if animal.starts_with('o') { "an" } else { "a" };
    let question = match rng.random_range(0..2) {
        0 => format!("Tell me a short story about {article} {animal} called {name} who finds {treasure} {place}."),
        _ => format!("Write a little story: {name} is {article} {animal} and finds {treasure} {place}."),
    };
    let answer = format!(
        "Once upon a time there was {article} {animal} called {name}. One morning {name} went for a walk {place}. {scene} Suddenly {name} saw something on the ground. It was {treasure}! The {animal} picked it up and took a closer look. {end} And {name} the {animal} was very happy."
    );
    Turn { question, answer }
}

const ADJECTIVES: [(&str, &str); 8] = [
    ("red", "kima"),
    ("small", "pilo"),
    ("old", "daru"),
    ("quiet", "sehi"),
    ("green", "vona"),
    ("big", "gato"),
    ("young", "luma"),
    ("kind", "beli"),
];
const NOUNS: [(&str, &str); 12] = [
    ("bird", "tiko"),
    ("house", "maro"),
    ("tree", "selu"),
    ("child", "nabi"),
    ("boat", "foru"),
    ("river", "zana"),
    ("stone", "hoku"),
    ("horse", "reva"),
    ("friend", "omi"),
    ("garden", "wela"),
    ("cloud", "yuni"),
    ("road", "caso"),
];
const VERBS: [(&str, &str); 6] = [
    ("sees", "anto"),
    ("likes", "ebri"),
    ("finds", "irko"),
    ("follows", "ulto"),
    ("remembers", "asken"),
    ("paints", "ondu"),
];

/// A sentence of a toy language, word by word: adjectives follow their noun, the verb comes last.
pub(crate) fn translation(rng: &mut ChaCha8Rng) -> Turn {
    let (adjective, noun) = (pick(&ADJECTIVES, rng), pick(&NOUNS, rng));
    let (verb, object) = (pick(&VERBS, rng), pick(&NOUNS, rng));
    let sentence = format!("The {} {} {} the {}.", adjective.0, noun.0, verb.0, object.0);
    let words = [noun, adjective, object, verb].map(|(english, zori)| format!("{english} = {zori}"));
    Turn {
        question: format!("Translate into Zori: {sentence}"),
        answer: format!(
            "Word by word: {}.\nIn Zori the adjective follows its noun and the verb comes last.\nThe sentence in Zori is: Lo {} {} lo {} {}.",
            words.join(", "),
            noun.1,
            adjective.1,
            object.1,
            verb.1
        ),
    }
}
