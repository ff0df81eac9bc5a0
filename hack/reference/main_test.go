package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

func TestReferencePageIsUpToDate(t *testing.T) {
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

func TestChartTableHasEveryValue(t *testing.T) {
	table, err := chartTable([]byte("# one\n# two\na: 1\n\n# --- heading ---\n\n# of the group\ng:\n  # inner\n  b: []\n  c: " +
		"{x: y}\nd: \"\"\n"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| `a` | `1` | one two |\n", "| `g` | | of the group |\n", "| `g.b` | `[]` | inner |\n", "| `d` |  |  |\n"} {
		if !strings.Contains(table, want) {
			t.Errorf("no row %q in\n%s", want, table)
		}
	}
}

func TestKindTableMatchesTypes(t *testing.T) {
	table, err := kindTable("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range strings.Split(strings.TrimSpace(table), "\n")[2:] {
		columns := strings.Split(row, "|")
		kind, field := strings.TrimSpace(columns[1]), strings.Trim(columns[2], " `")
		document := "null" // valid for every type
		keys := strings.Split(field, ".")
		for _, key := range slices.Backward(keys) {
			document = `{"` + key + `": ` + document + `}`
		}
		document = `{"apiVersion": "` + v1beta1.APIVersion + `", "kind": "` + kind + `", ` + strings.TrimPrefix(document, "{")
		if _, err := v1beta1.Decode([]byte(document)); err != nil {
			t.Errorf("%s is on the page, but the driver refuses it: %v", field, err)
		}
	}
	for _, want := range []string{
		"| GpuConfig | `sharing.timeSlicingConfig.interval` | string |",
		"| MigDeviceConfig | `sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit` | map of quantity |",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("no row %q in\n%s", want, table)
		}
	}
}
