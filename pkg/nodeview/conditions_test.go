package nodeview

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

func TestConditionKeepsItsStartTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newWorld(inventory.Snapshot{Ready: true}).start()
		began := time.Now()
		c.Report(Condition{Source: "runtime", Code: "a", Message: "one"})
		time.Sleep(time.Minute) //nolint:forbidigo // simulated time
		c.Report(Condition{Source: "runtime", Code: "a", Message: "another"})
		c.Report(Condition{Source: "runtime", Code: "b", Message: "another"})
		c.Clear("hook")
		if all := c.View().Conditions; len(all) != 1 || !all[0].Since.Equal(began) || all[0].Code != "b" || all[0].Message != "another" {
			t.Errorf("%+v", all)
		}
		c.Clear("runtime")
		c.Report(Condition{Source: "runtime", Code: "a"})
		if all := c.View().Conditions; !all[0].Since.Equal(began.Add(time.Minute)) {
			t.Errorf("%+v", all)
		}
	})
}

func TestConditionDueFirstIsShown(t *testing.T) {
	at := time.Now()
	early := Condition{Code: "early", Transient: true, Since: at, Types: NVIDIATypes}
	late := Condition{Code: "late", Since: at.Add(time.Second)}
	for name, c := range map[string]struct {
		after   time.Duration
		of      string
		want    string
		pending bool
	}{
		"one is transient":               {0, "gpu", "", true},
		"the other is due":               {time.Second, "gpu", "late", false},
		"both are due":                   {time.Hour, "gpu", "late", false},
		"a share":                        {time.Hour, "mig-share", "late", false},
		"a type that one affects":        {time.Second, "vfio", "late", false},
		"a type that one affects, early": {0, "vfio", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			got, shown, pending := ShownCondition([]Condition{early, late}, c.of, at.Add(c.after))
			if got.Code != c.want || shown != (c.want != "") || pending != c.pending {
				t.Errorf("%+v, %v, %v", got, shown, pending)
			}
		})
	}
	if _, shown, pending := ShownCondition([]Condition{early}, "vfio", at.Add(time.Hour)); shown || pending {
		t.Error("a missing NVIDIA driver affects a device that does not need it")
	}
}

// The documentation must list every code. Each is the value of a taint, and so of a label.
func TestDocsListEveryCode(t *testing.T) {
	constant := regexp.MustCompile(`\b[cC]ode[A-Z]\w*\s*= "([^"]+)"`)
	var codes []string
	for _, room := range []string{"nodeview", "driver", "quiesce", "inventory"} {
		files, err := filepath.Glob("../" + room + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", room, err)
		}
		for _, file := range files {
			for _, found := range constant.FindAllStringSubmatch(read(t, file), -1) {
				codes = append(codes, found[1])
			}
		}
	}
	_, section, _ := strings.Cut(read(t, "../../docs/operations.md"), "\n## A node that is not ready\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var listed []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1) {
		listed = append(listed, row[1])
		if wrong := validation.IsValidLabelValue(row[1]); len(wrong) > 0 {
			t.Errorf("%q: %v", row[1], wrong)
		}
	}
	slices.Sort(codes)
	slices.Sort(listed)
	if !slices.Equal(codes, listed) {
		t.Errorf("docs/operations.md lists\n%q, the code has\n%q", listed, codes)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
