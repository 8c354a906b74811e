"""Words for needles' keys: an adjective, a hyphen and a noun, as in RULER (the lists are our own)."""

_ADJECTIVES = """
able agile alert amber ample ancient aquatic arctic autumn azure bold brave brief bright brisk broad bronze calm
candid careful cheerful chilly clean clever cloudy coastal cosmic cosy crimson crisp curious daily daring dazzling
deep delicate distant dusty eager early earnest eastern electric elegant emerald endless equal exact faint faithful
famous fancy fearless festive final flat fluffy fond formal fragile free fresh friendly frosty frozen gentle giant
glad golden graceful grand grateful handy happy hasty hearty heavy hidden hollow honest humble hungry icy ideal inland
jolly jovial keen kind large lasting lively lofty lonely loud loyal lucky lunar magic marble mellow merry mighty misty
modern modest narrow neat nimble noble northern novel odd olive open orange patient peaceful plain polite proud pure
purple quick quiet radiant rapid rare ready restless rich rough round royal rustic sacred salty scarlet serene shallow
sharp shiny silent silver simple sincere slender smooth snowy soft solar solid southern spare speedy stable steady
stormy strong sturdy subtle sudden sunny swift tall tame tender thirsty tidy tiny tough tranquil tropical upbeat urban
useful vast velvet vivid warm wary weekly western wild windy wise witty wooden young zesty
"""

_NOUNS = """
acorn actor airport album almond anchor ankle antler apple apron arrow artist atlas attic avenue badge bakery balcony
balloon banjo barley barrel basket beacon beaver bench berry blanket blossom boat border bottle boulder bracelet
branch bridge brook bucket butter button cabin cactus camera canal candle canoe canyon carpet carrot castle cedar
cellar chair chapel cherry chimney circle citizen clock cloud clover coach cobbler comet compass copper coral corner
cottage cotton cousin cradle crane cricket crown curtain dancer desert diamond dinner doctor dolphin donkey dragon
drawer driver eagle engine envelope falcon farmer feather fender ferry fiddle field finger flag flower flute forest
fossil fountain garden garlic gate gazelle ginger glacier glove goose granite grape guitar hammer harbor harvest hazel
helmet heron hill hive honey horizon hornet hotel island ivory jacket jasmine jewel journal jungle kettle keyboard
kitchen kite ladder lagoon lake lantern lemon lentil letter library lily lion lizard lobster locket magnet mango maple
market marsh meadow melon merchant meteor mirror monkey morning mountain museum napkin needle noodle notebook oasis
ocean onion orchard otter oven owl oyster paddle palace panda panther paper parade parrot pebble pencil penguin pepper
piano picture pillow pilot pine planet plaza pocket poet pond potato prairie pumpkin puzzle quartz quilt rabbit raven
reef ribbon river robin rocket rope saddle saffron sailor salmon sandal saucer school shadow shell shovel signal
singer sparrow spider spoon spring squirrel station statue stream street sunset table teacher temple thimble thunder
tiger timber tower trail train trumpet tulip tunnel turtle umbrella valley vessel village violin voyage wagon walnut
walrus window winter wizard wolf yard zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
