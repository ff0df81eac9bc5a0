package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
)

// api is the package with the kinds of opaque configuration, and kinds are those that a device takes.
const api = "api/resource/v1beta1"

var kinds = []string{"GpuConfig", "MigDeviceConfig"}

// kindTable lists the fields that a user may write, with the comments that the API's types have.
func kindTable(root string) (string, error) {
	types, err := declaredTypes(filepath.Join(root, api))
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("| kind | field | type | meaning |\n|---|---|---|---|\n")
	for _, kind := range kinds {
		if err := fields(&b, types, kind, kind, ""); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

func declaredTypes(dir string) (map[string]ast.Expr, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	types := map[string]ast.Expr{}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, e.Name()), nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if t, ok := n.(*ast.TypeSpec); ok {
				types[t.Name.Name] = t.Type
			}
			return true
		})
	}
	return types, nil
}

// fields writes a row for each field of a struct, and then those of the field's own.
func fields(b *strings.Builder, types map[string]ast.Expr, kind, of, prefix string) error {
	object, ok := types[of].(*ast.StructType)
	if !ok {
		return fmt.Errorf("%s: %s is no struct", api, of)
	}
	for _, f := range object.Fields.List {
		if len(f.Names) == 0 {
			continue // apiVersion and kind, which every configuration has
		}
		key := jsonKey(f)
		if key == "" || f.Doc == nil {
			return fmt.Errorf("%s: field %s of %s has no name in JSON, or no comment", api, f.Names[0].Name, of)
		}
		written, nested, err := typeOf(types, f.Type)
		if err != nil {
			return fmt.Errorf("%s: field %s of %s: %w", api, f.Names[0].Name, of, err)
		}
		fmt.Fprintf(b, "| %s | `%s` | %s | %s |\n", kind, prefix+key, written, cell(sentence(f)))
		if nested != "" {
			if err := fields(b, types, kind, nested, prefix+key+"."); err != nil {
				return err
			}
		}
	}
	return nil
}

// sentence is a field's comment without its beginning, the field's name in Go.
func sentence(f *ast.Field) string {
	text := strings.Join(strings.Fields(f.Doc.Text()), " ")
	text = strings.TrimPrefix(text, f.Names[0].Name+" ")
	text = strings.TrimPrefix(text, "is ")
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

func jsonKey(f *ast.Field) string {
	if f.Tag == nil {
		return ""
	}
	key, _, _ := strings.Cut(reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("json"), ",")
	return key
}

// typeOf says how a value is written in YAML; nested is the struct whose fields it has.
func typeOf(types map[string]ast.Expr, t ast.Expr) (written, nested string, err error) {
	switch t := t.(type) {
	case *ast.StarExpr:
		return typeOf(types, t.X)
	case *ast.MapType:
		written, _, err = typeOf(types, t.Value)
		return "map of " + written, "", err
	case *ast.Ident:
		switch t.Name {
		case "string":
			return "string", "", nil
		case "bool":
			return "boolean", "", nil
		case "int":
			return "integer", "", nil
		case "MemoryLimit":
			return "quantity", "", nil
		}
		if _, is := types[t.Name].(*ast.StructType); is {
			return "object", t.Name, nil
		}
		if base, known := types[t.Name]; known {
			return typeOf(types, base)
		}
	}
	return "", "", fmt.Errorf("how a %T is written is not known here", t)
}
