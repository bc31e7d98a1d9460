"""Checks of a request before its fields are read: its type, unknown, missing and repeated fields.

FastAPI ignores unknown fields and files, and takes the last of a repeated field. A client that
sends them expects something else.
"""

from collections import Counter
from typing import Any, get_origin

from fastapi import HTTPException, Request, UploadFile
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile as StarletteFile

FORM_TYPE = "multipart/form-data"


async def check_query(request: Request) -> None:
    """Raise HTTPException 422 for a parameter behind `?` that the endpoint does not have."""
    names = [field.alias for field in request.scope["route"].dependant.query_params]
    if set(request.query_params) <= set(names):
        return
    fix = "the endpoint has none"
    if names:
        fix = f"it may have: {', '.join(names)}"
    elif request.method == "POST":
        fix = "send fields in the form"
    raise HTTPException(422, f"the query has an unknown parameter; {fix}")


def is_file(kind: Any) -> bool:
    """Return whether a field of this type is a file, or several."""
    return kind in (UploadFile, list[UploadFile])


async def check_form(request: Request) -> None:
    """Raise HTTPException 415 or 422 unless a form has the fields of its endpoint."""
    # Field -> its type, such as list[UploadFile].
    types: dict[str, Any] = {}
    for field in request.scope["route"].dependant.body_params:
        types[field.alias] = field.field_info.annotation
    sent_type, _, _ = request.headers.get("content-type", "").partition(";")
    if sent_type.strip().lower() != FORM_TYPE:
        files = [name for name, kind in types.items() if is_file(kind)]
        options = " ".join(f"-F {name}=@FILE" for name in files)
        raise HTTPException(415, f"the body must be {FORM_TYPE} (curl: {options})")
    form = await request.form()  # has been read before, within the limits
    counts: Counter[str] = Counter()
    for name, value in form.multi_items():
        counts[name] += 1
        if name not in types:
            # Without the name, which may be long.
            raise HTTPException(
                422, f"the form has an unknown field; it may have: {', '.join(types)}"
            )
        is_many = get_origin(types[name]) is list
        if counts[name] > 1 and not is_many:
            raise HTTPException(422, f"{name}: is there more than once")
        needs_file = is_file(types[name])
        if needs_file and not isinstance(value, StarletteFile):
            raise HTTPException(422, f"{name}: must be a file (curl: {name}=@FILE)")
        if not needs_file and isinstance(value, StarletteFile):
            raise HTTPException(422, f"{name}: must be text (curl: {name}=TEXT)")


async def refuse_fields(request: Request, error: Any) -> JSONResponse:
    """Answer missing or wrong fields in one line, without repeating what was sent."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    return JSONResponse({"detail": f"{place}: {first['msg']}"}, status_code=422)
