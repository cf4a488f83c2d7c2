"""Common English words, most of them one token of most vocabularies, to make prompts of."""

_TEXT = """
about after again against air all also always and animal answer any area ask away back base because
been before begin behind best better between big black blue body book both box boy bring build but
call came can car carry change children city clear close cold color come common could country course
cover cut dark day did different door down draw each early earth east eat end enough even ever every
example eye face fact family far farm fast father feel few field figure final find fine fire first
fish five follow food foot for form four free friend from full game gave girl give glass gold good
great green ground group grow half hand hard has have head hear heart heat help her here high him
his hold home horse hot hour house how idea inch into island just keep kind king knew know land
language large last late laugh lead learn leave left less letter life light like line list listen
little live long look low machine made main make man many map mark may mean measure men might mile
mind minute money moon more morning most mother mountain move much music must name near need never
new next night north note nothing notice now number off often old once one only open order other our
out over own page paper part pass pattern people perhaps person picture piece place plain plan plane
plant play point power press problem product pull put question quick rain reach read ready real
record red remember rest right river road rock room round rule run said same saw say school science
sea second see seem sentence serve set several shape she ship short should show side simple since
sing six size sleep slow small snow some song soon sound south space special stand star start state
stay step still stop story street strong study such sun sure surface table tail take talk teach tell
ten test than that their them then there these they thing think this those though thought thousand
three through time together told took top toward town travel tree true try turn two under unit until
use very voice vowel wait walk want war warm was watch water way week weight well went were west
what wheel where which while white who whole why will wind with wonder wood word work world would
write year yes yet you young your
"""
WORDS = tuple(_TEXT.split())
