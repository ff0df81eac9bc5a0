package main

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRulesAreUpToDate(t *testing.T) {
	old, err := os.ReadFile("../../" + file)
	if err != nil {
		t.Fatal(err)
	}
	updated, err := render()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(old), string(updated)); diff != "" {
		t.Errorf("%s is out of date, run `make reference` (-is +should):\n%s", file, diff)
	}
}
