package events

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

func TestStateThatLastsIsOneEvent(t *testing.T) {
	recorder := record.NewFakeRecorder(10)
	r := NewFor(recorder, "node")
	for i, c := range []struct {
		reason  Reason
		state   string
		written bool
	}{
		{GPUsWithheld, "", false},
		{GPUsWithheld, "one", true},
		{GPUsWithheld, "one", false},
		{SlowScheduler, "one", true},
		{GPUsWithheld, "two", true},
		{GPUsWithheld, "", false},
		{GPUsWithheld, "two", true},
	} {
		r.EventOnChange(c.reason, c.state, "because of "+c.state)
		if written := len(recorder.Events) == 1; written != c.written {
			t.Errorf("%d: written: %v", i, written)
		}
		if c.written {
			if e := <-recorder.Events; e != "Warning "+c.reason.String()+" because of "+c.state {
				t.Errorf("%d: %s", i, e)
			}
		}
	}
}

func TestCatalogueIsComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Catalogue() {
		if seen[r.String()] || r.Severity() != corev1.EventTypeNormal && r.Severity() != corev1.EventTypeWarning {
			t.Errorf("%s: twice, or its severity %q is unknown", r, r.Severity())
		}
		seen[r.String()] = true
		for _, text := range []string{r.Objects(), r.Meaning(), r.Action()} {
			if text == "" || strings.HasSuffix(text, ".") || strings.Contains(text, "|") {
				t.Errorf("%s: %q is no cell of a table", r, text)
			}
		}
	}
	if len(seen) == 0 {
		t.Error("no reason")
	}
}

// A Reason is opaque, so no other package can write an Event that the catalogue lacks, unless it
// has a recorder of its own.
func TestOnlyThisPackageHasARecorder(t *testing.T) {
	for _, root := range []string{"../../pkg", "../../cmd"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || filepath.Dir(path) == "../../pkg/events" {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
			if err != nil {
				return err
			}
			for _, i := range file.Imports {
				if i.Path.Value == `"k8s.io/client-go/tools/record"` || i.Path.Value == `"k8s.io/client-go/tools/events"` {
					t.Errorf("%s imports %s: write Events with package events", path, i.Path.Value)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
