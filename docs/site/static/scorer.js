// The FAQ comes before other pages that match as well. The numbers below are Sphinx's.
var Scorer = {
  score: ([docname, , , , score]) => score + (docname === "faq" ? 1 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
