package conformance

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
)

// hardwareDoc says how sure each part of the simulation is.
const hardwareDoc = "../../../docs/hardware.md"

// noDifference are the fields of a node file that do not describe how real drivers differ.
var noDifference = []string{"name", "note", "driverVersion", "cudaVersion", "gpus", "otherDevices", "passthrough", "vfio"}

var (
	tableRow = regexp.MustCompile(`(?m)^\| (.+) \|$`)
	setting  = regexp.MustCompile("`([a-zA-Z]+)`")
)

// Each setting of a node file must be in the table of differences with how sure it is and a source.
// The awkward node must have it, unless the table says that it has not.
func TestSettingsOfNodesAreDocumented(t *testing.T) {
	needSimulator(t)
	document, err := os.ReadFile(hardwareDoc)
	if err != nil {
		t.Fatal(err)
	}
	text := string(document)
	_, table, ok := strings.Cut(text, "## What differs between nodes")
	if !ok {
		t.Fatalf("%s has no table of differences", hardwareDoc)
	}
	table, _, _ = strings.Cut(table, "\n## ")
	documented := map[string][]string{}
	for _, row := range tableRow.FindAllStringSubmatch(table, -1) {
		cells := strings.Split(row[1], " | ")
		if len(cells) != 4 {
			t.Fatalf("the row has %d cells, want difference, setting, how sure, source: %s", len(cells), row[0])
		}
		for _, s := range setting.FindAllStringSubmatch(cells[1], -1) {
			documented[s[1]] = cells
		}
	}
	awkward := reflect.ValueOf(*readNode(t, "awkward"))
	for i := range awkward.NumField() {
		name, _, _ := strings.Cut(reflect.TypeFor[model.Node]().Field(i).Tag.Get("json"), ",")
		if slices.Contains(noDifference, name) {
			continue
		}
		cells, there := documented[name]
		if !there {
			t.Errorf("%s: the setting %s is missing", hardwareDoc, name)
			continue
		}
		if sure := strings.Split(cells[2], ",")[0]; !slices.Contains([]string{"sure", "both ways", "all ways"}, sure) || cells[3] == "" {
			t.Errorf("%s: the setting %s is %q, source %q", hardwareDoc, name, cells[2], cells[3])
		}
		if left := strings.Contains(cells[2], "not on the awkward node"); left != awkward.Field(i).IsZero() {
			t.Errorf("%s: the setting %s is %q, and the awkward node has it: %t", hardwareDoc, name, cells[2], left)
		}
	}
}
