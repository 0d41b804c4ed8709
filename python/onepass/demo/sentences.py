"""The sentences that the demo embeds: of many lengths, so that padding is real, and some of them near in meaning."""

SENTENCES = (
    "The ferry was late again.",
    "Snow had fallen all night, and by morning the lane to the farm could no longer be told from the fields beside it.",
    "Rain kept us indoors.",
    "She tuned the old piano herself, one string after another, with a borrowed key and an app on her telephone.",
    "Our neighbour repairs bicycles in his garage at the weekend.",
    "On Saturdays the man next door fixes bikes in his shed.",
    "Why do cats knock things off tables?",
    "The museum closes at five on weekdays, but on the first Thursday of every month it stays open until nine, and "
    "then admission is free for students and for everybody who lives in the city.",
    "Water boils at a lower temperature in the mountains because the air presses less on it.",
    "At high altitude, water starts to boil before it reaches a hundred degrees.",
    "He apologised.",
    "A short walk after lunch does more for my concentration than a second cup of coffee ever did.",
    "The committee postponed the vote, since three of its members were stuck on a train outside the town.",
    "Please send me the signed contract by Friday.",
    "I need you to return the agreement with your signature before the end of the week.",
    "Bees tell each other where the flowers are by dancing on the comb.",
    "The price of bread has doubled within two years.",
    "Bread costs twice as much as it did two years ago.",
    "Nobody remembered who had planted the walnut tree, only that it had been there before the house and would, in "
    "all likelihood, be there after it.",
    "The engine starts, but it stalls as soon as I take my foot off the pedal.",
    "My car's motor dies whenever I stop pressing the accelerator.",
    "Turn left at the bakery.",
    "The second violinist broke a string in the slow movement and played on as though nothing had happened.",
    "How long should an egg be boiled so that the yolk stays soft?",
    "Researchers at the coast have counted seals from the air every spring since the nineteen-seventies; this year, "
    "for the first time, a camera on a small drone did the work that used to take four people and a hired "
    "aeroplane.",
    "The lamp on the landing flickers when the lift moves.",
    "Children under six travel free of charge.",
    "There is no fare for passengers younger than six years.",
    "After the flood the villagers carried the archive, box by box, to the school on the hill and hung the wettest "
    "pages on washing lines across the gymnasium.",
    "It works on my machine.",
    "The test passes locally but fails on the build server.",
    "A spoonful of vinegar in the water keeps the cabbage red.",
    "The goalkeeper saved two penalties and then scored the winning one herself.",
    "Their daughter is studying to become a veterinary surgeon in a town where sheep outnumber people by twelve to "
    "one.",
    "Sailors once believed that whistling on deck would call up a storm.",
    "The library lends out seeds as well as books.",
    "You may borrow tools, seeds and even cake tins from the public library; all that it asks is that you bring "
    "back something of the kind in the autumn, be it a packet of your own beans or simply a clean tin.",
    "The bridge is closed to lorries.",
    "Heavy vehicles are not allowed to cross the river here.",
    "Moss grows on the north side of the roof, where the sun seldom reaches.",
    "I dreamt that I had to sit my final examinations again, in a language which I could read but not speak.",
    "The kettle is older than I am.",
    "An unusually warm current has brought jellyfish far up the coast, and the fishermen spend more time cleaning "
    "their nets than casting them.",
    "Could you speak a little more slowly?",
    "The tailor took one look at the coat and said that it was not worth turning.",
    "Grandmother's recipe asks for a pound of plums, half as much sugar, and patience.",
    "The telescope needs a night without wind, a mirror without dust and an observer without a cold.",
    "Sales of umbrellas rise before an election, though nobody can say why.",
    "He read the letter twice, folded it along its old creases, put it back behind the clock and did not mention it "
    "until the spring, when the ground had thawed and there was something to be done about it.",
    "The glacier has withdrawn by two kilometres since the hut was built.",
    "Since they put up the hut, the ice has retreated more than a mile.",
    "Good morning!",
    "The printer is out of paper, the copier is out of toner, and I am out of ideas.",
    "A wooden ship lies at the bottom of the harbour, so well kept by the cold and the mud that its ropes still hold.",
    "The baker gets up at two so that the town can have breakfast at seven.",
    "This medicine should be taken with plenty of water, never on an empty stomach, and not together with grapefruit.",
    "The swallows left early this year.",
    "Owls can turn their heads almost all the way around because their eyes cannot move in their sockets.",
    "Between the two wars the theatre was a dance hall, then a warehouse for apples, and for one cold winter, as "
    "the older people in the street like to tell anyone who stops to read the plaque, the home of a circus with a "
    "single elephant.",
    "The referee blew his whistle and the whole valley fell silent.",
    "Do not forget to water the tomatoes while we are away.",
    "Someone has to look after the tomato plants during our holiday.",
    "The lecture on soil was better attended than the one on stars.",
    "Every key on the ring opened something, except the largest.",
)
