package main

import (
	"regexp"
	"strings"
)

// goneWords are the forbidden words in all their forms, each with the words to write instead.
var goneWords = []struct{ forms, write string }{
	{"turn turns turned turning", "leader lock, become, switch on or off, one after another"},
	{"beside besides", "next to, and, in addition to"},
	{"glance glances glanced glancing", "change detector, fingerprint, look"},
	{"joint joints jointly", "coalesced, shared, together"},
	{"mend mends mended mending mender", "repair, fix"},
	{"seat seats seated", "worker slot"},
	{"outbox outboxes", "event queue"},
	{"told", "reported, enqueued, notified"},
	{"stray strays", "leftover"},
	{"knob knobs", "GPU setting, option"},
}

// riddles are patterns of forbidden phrases, because such a phrase hides who does what. Each has
// the advice what to write instead.
var riddles = []riddle{
	{phrase(`somebody`), "name who: the user, another process, a claim"},
	{phrase(`nobody`), "name who: no claim, no process, no user"},
	{phrase(`whoever`), "name who: the caller, the holder, every process that"},
	{phrase(`who listens`), "write the watcher, the subscriber"},
	{phrase(`what is had`), "name the thing"},
	{phrase(`(is|are|was|were) said`), "say who logs, reports or writes it"},
	{phrase(`looked at`), "write checks, reads or inspects, and say who does"},
}

// exceptions are the files that may use a forbidden word. path is the beginning of the file's path.
// An empty word allows all words.
var exceptions = []exception{
	{"hack/textcheck/", "", "the tables and their test name what they refuse"},
	{"hack/vale/styles/", "", "the same words for the documentation's linter"},
	{"test/cluster/internal/toolchain/images.go", "nobody", "a user in /etc/passwd"},
}

type riddle struct {
	pattern *regexp.Regexp
	write   string
}

type exception struct{ path, word, reason string }

// gone has an entry for each form of each forbidden word: the words to write instead.
var gone = func() map[string]string {
	forms := map[string]string{}
	for _, w := range goneWords {
		for form := range strings.FieldsSeq(w.forms) {
			forms[form] = w.write
		}
	}
	return forms
}()

func phrase(expression string) *regexp.Regexp {
	return regexp.MustCompile(`(?i)\b(` + strings.ReplaceAll(expression, " ", `\s+`) + `)\b`)
}
