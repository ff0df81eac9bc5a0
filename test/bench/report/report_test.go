package report

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func samples(from, to int) *Samples {
	s := &Samples{}
	for i := to; i >= from; i-- {
		s.All = append(s.All, time.Duration(i)*time.Millisecond)
	}
	return s
}

func TestRowHasPercentilesAndRatio(t *testing.T) {
	var r Report
	floor := r.Add("Prepare", "floor", samples(1, 100))
	twice := r.Add("Prepare", "ours", samples(102, 201)).Compare(floor)
	if floor.P50 != 51 || floor.P90 != 91 || floor.P99 != 100 || floor.Count != 100 {
		t.Errorf("got %+v", floor)
	}
	if twice.Ratio50 < 2.9 || twice.Ratio50 > 3 || twice.Of != "floor" {
		t.Errorf("got %+v", twice)
	}
	if one := r.Add("once", "ours", samples(7, 7)); one.P50 != 7 || one.P99 != 7 {
		t.Errorf("got %+v", one)
	}
	if none := r.Add("never", "ours", &Samples{}); none.P50 != 0 || none.PerSecond != 0 {
		t.Errorf("got %+v", none)
	}
}

func TestThroughputOfParallelSamples(t *testing.T) {
	s := samples(10, 13)
	s.Within = 20 * time.Millisecond
	if row := (&Report{}).Add("at once", "ours", s); row.PerSecond != 200 {
		t.Errorf("%v a second", row.PerSecond)
	}
}

func TestTableMarksMissedGoals(t *testing.T) {
	var r Report
	r.AtMost("met", "ours", 1, 1, "×")
	r.AtLeast("also met", "ours", 3, 3, "×")
	r.AtMost("too much", "ours", 1.01, 1, "×")
	r.AtLeast("too little", "ours", 2.99, 3, "×")
	var table, raw bytes.Buffer
	if err := r.Table(&table); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(table.String()) {
		if want := strings.HasPrefix(line, "too"); strings.Contains(line, "NOT MET") != want {
			t.Errorf("%q", line)
		}
	}
	var again Report
	if err := r.JSON(&raw); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw.Bytes(), &again); err != nil || len(again.Goals) != 4 || again.Goals[3].Met() {
		t.Errorf("got %v, %v", again.Goals, err)
	}
}
