package main

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheReferencePageIsUpToDate(t *testing.T) {
	const root = "../.."
	old, err := os.ReadFile(root + "/" + page)
	if err != nil {
		t.Fatal(err)
	}
	updated, err := update(root, old)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(old), "\n"), strings.Split(string(updated), "\n")); diff != "" {
		t.Errorf("%s is out of date, run `make reference` (-is +should):\n%s", page, diff)
	}
}

func TestEveryValueIsARowWithItsComment(t *testing.T) {
	table, err := chartTable([]byte("# one\n# two\na: 1\n\n# --- heading ---\n\n# of the group\ng:\n  # inner\n  b: []\n  c: {x: y}\nd: \"\"\n"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| `a` | `1` | one two |\n", "| `g` | | of the group |\n", "| `g.b` | `[]` | inner |\n", "| `d` |  |  |\n"} {
		if !strings.Contains(table, want) {
			t.Errorf("no row %q in\n%s", want, table)
		}
	}
}
