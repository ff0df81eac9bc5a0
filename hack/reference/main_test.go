package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
)

func TestPagesAreUpToDate(t *testing.T) {
	const root = "../.."
	for page, update := range pages {
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
}

func TestSupportTablesDistinguishGates(t *testing.T) {
	runs := map[string]run{"v1.34.4 v2.3.7": {
		Defaults: findings{APIs: []string{"v1"}, Works: map[string]string{"taint": "no: withdrawn", "share": "no: none"}},
		All: findings{
			APIs: []string{"v1", "v1beta1"}, Gates: []string{"DRADeviceTaints"}, Works: map[string]string{"taint": "yes", "share": "no: rejected"},
		},
	}}
	for table, rows := range map[string][]string{
		pairTable(runs):    {"| v1.34.4 | not run | passed |", "| v1.37.2 | not run | not run |"},
		featureTable(runs): {"| taint | with the gates | not run |", "| share | no: none. With the gates: no: rejected | not run |"},
		apiTable(runs):     {"| `DRADeviceTaints` | off | not run |", "| versions of `resource.k8s.io` | v1 | not run |"},
	} {
		for _, want := range rows {
			if !strings.Contains(table, want) {
				t.Errorf("no %q in\n%s", want, table)
			}
		}
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
