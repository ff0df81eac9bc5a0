package main

import "testing"

// A mistake whose text is gone would no longer be one.
func TestEveryMistakeCanBeMade(t *testing.T) {
	if len(mistakes) < 20 {
		t.Errorf("%d mistakes are few", len(mistakes))
	}
	for _, m := range mistakes {
		if _, err := m.apply("../../.."); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
