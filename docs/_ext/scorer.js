// The site's search: guides come before the glossary, and both before pages about klfast's source.
var Scorer = {
  score: ([page, , , , score]) =>
    score - (/^(CHANGELOG|CONTRIBUTING|DESIGN|citing|csrc|kernels|proved)$/.test(page) ? 4 : 0)
          - (page === "glossary" ? 1 : 0),
  // The others are Sphinx's own.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
