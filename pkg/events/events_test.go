package events

import (
	"testing"

	"k8s.io/client-go/tools/record"
)

func TestStateThatLastsIsOneEvent(t *testing.T) {
	recorder := record.NewFakeRecorder(10)
	r := NewFor(recorder, "node")
	for i, c := range []struct {
		reason, state string
		written       bool
	}{
		{"A", "", false},
		{"A", "one", true},
		{"A", "one", false},
		{"B", "one", true},
		{"A", "two", true},
		{"A", "", false},
		{"A", "two", true},
	} {
		r.WarnOnChange(c.reason, c.state, "because of "+c.state)
		if written := len(recorder.Events) == 1; written != c.written {
			t.Errorf("%d: written: %v", i, written)
		}
		if c.written {
			if e := <-recorder.Events; e != "Warning "+c.reason+" because of "+c.state {
				t.Errorf("%d: %s", i, e)
			}
		}
	}
}
