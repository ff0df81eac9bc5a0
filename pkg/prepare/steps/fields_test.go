package steps

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

// presentForm is the form of the records that this version writes. The tests of package prepare
// read the files of each form.
const presentForm = "v0.1"

func TestStoredFieldsAreThoseOfThePresentForm(t *testing.T) {
	stored := map[string]any{}
	for _, empty := range kinds {
		stored[empty().Kind()] = empty()
	}
	for _, empty := range sharables {
		stored[empty().Kind()] = empty()
	}
	durabletest.CheckFields(t, "../testdata/records", presentForm, stored)
}
